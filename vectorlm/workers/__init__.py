"""Processes beside a rank that run the user's code, and that can be ended."""

from vectorlm.workers.pool import Worker, WorkerPool, together

__all__ = ["Worker", "WorkerPool", "together"]
