"""Checks before a run starts: rules, memory plan, dry run, resuming, and a summary for people."""
