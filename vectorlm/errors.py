"""The exception tree of the library.

Every error that the library raises on purpose is a `VectorLMError`, and also the built-in exception that it refines, so
``except ValueError`` keeps working. All of them pickle: text and rank are the whole state, so they cross process
borders unchanged.
"""

from __future__ import annotations

from typing import Self


class VectorLMError(Exception):
    """Root of all errors that this library raises on purpose."""

    rank: int | None = None
    """The rank that it comes from, where all ranks raise the error of one."""

    def of_rank(self, rank: int | None) -> Self:
        """Note the rank that it comes from, unless one is noted already, and return the error."""
        self.rank = rank if self.rank is None else self.rank
        return self


class ConfigError(VectorLMError, ValueError):
    """A setting is unknown, of the wrong type or impossible."""


class DatasetError(VectorLMError, ValueError):
    """A dataset is missing, empty or lacks a column."""


class LaunchError(VectorLMError, RuntimeError):
    """The ranks could not be started."""


class RankFailed(VectorLMError, RuntimeError):
    """A rank raised or died; the text holds its error and traceback."""


class HandoffTimeout(VectorLMError, TimeoutError):
    """A rank did not reach a meeting point within the deadline."""


class RankMismatch(VectorLMError, ValueError):
    """Ranks called the same collective method with different arguments."""


class OutOfTurn(VectorLMError, RuntimeError):
    """Training began while the devices were the engine's, or sampling while they were the trainer's."""


class EngineError(VectorLMError, RuntimeError):
    """The engine raised; the text holds its traceback."""


class EngineDied(EngineError, ConnectionError):
    """The sampler process is gone."""


class EngineTimeout(EngineError, TimeoutError):
    """The sampler process has been silent for longer than the deadline."""


class UnknownAdapter(EngineError, LookupError):
    """The engine has no adapter of this name; the text lists those that it has."""


class StaleHandle(EngineError, LookupError):
    """The memory that a rank exported for its weights has moved or was freed."""


class ChangedBySleep(EngineError):
    """After a sleep the engine computes something else; it samples nothing until it is built again."""


class HandleRefused(EngineError, OSError):
    """A device's memory cannot be read by another process on this machine."""


class WeightMismatch(VectorLMError, ValueError):
    """Trainer and engine disagree on parameter names or shapes."""


class ChecksumMismatch(WeightMismatch):
    """After an update the engine does not hold the weights that were sent."""


class NonFiniteWeights(WeightMismatch, ArithmeticError):
    """The trainer's weights hold NaN or infinity, and the engine was not given them."""


class RewardError(VectorLMError, RuntimeError):
    """A reward function raised, or ran out of time."""


class RolloutError(VectorLMError, RuntimeError):
    """An environment failed in the middle of a rollout."""


class WorkerLost(VectorLMError, RuntimeError):
    """A process that ran the user's code was too late and was ended, or has ended."""


class WorkersDied(VectorLMError, RuntimeError):
    """Processes that run the user's code die one after the other."""


class NonFiniteLoss(VectorLMError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite."""


class ExactnessError(VectorLMError, ArithmeticError):
    """In exact mode, a log-probability of the trainer has other bits than the engine's."""


class CheckpointError(VectorLMError, RuntimeError):
    """A checkpoint is incomplete, or belongs to another run."""
