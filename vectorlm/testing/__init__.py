"""The suite that every `vectorlm.types.Engine` must pass; docs/engines.md shows how to run it on yours."""

from vectorlm.testing.contract import CHECKS, MODEL_CHECKS, Check, run_checks
from vectorlm.testing.subject import Subject

__all__ = ["CHECKS", "MODEL_CHECKS", "Check", "Subject", "run_checks"]
