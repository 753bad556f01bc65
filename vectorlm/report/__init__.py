"""Metrics, pictures and pages of a run."""
