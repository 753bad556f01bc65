"""Whether a run can be carried out on this machine: checks, memory plan, resuming, and a summary for people."""
