"""The suites of the contracts; docs/engines.md and docs/contracts.md show how to run them on what is yours."""

from vectorlm.testing.contract import CHECKS, MODEL_CHECKS, Check, run_checks
from vectorlm.testing.subject import Subject
from vectorlm.testing.trainers import TRAINER_CHECKS, TrainerSubject

__all__ = ["CHECKS", "MODEL_CHECKS", "TRAINER_CHECKS", "Check", "Subject", "TrainerSubject", "run_checks"]
