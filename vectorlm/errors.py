"""The exception tree of the library.

Every error that the library raises itself is a `VectorLMError` and also a built-in exception: ``except ValueError``
catches a `ConfigError`. All of these errors can be pickled, because the text and the rank are their whole state.
"""

from __future__ import annotations

from typing import Self


class VectorLMError(Exception):
    """Base class of all errors that this library raises itself."""

    rank: int | None = None
    """The rank that failed, if all ranks raise its error; None if it is not known."""

    def of_rank(self, rank: int | None) -> Self:
        """Set `rank`, unless it is set already, and return the error."""
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
    """A rank did not join a collective call within the time limit."""


class RankMismatch(VectorLMError, ValueError):
    """Ranks called the same collective method with different arguments."""


class OutOfTurn(VectorLMError, RuntimeError):
    """A sampling block contains an optimizer step, a read of the optimizer's state, or another sampling block."""


class EngineError(VectorLMError, RuntimeError):
    """The engine raised; the text holds its traceback."""


class EngineDied(EngineError, ConnectionError):
    """The sampler process has exited."""


class EngineTimeout(EngineError, TimeoutError):
    """The sampler process has been silent for longer than the time limit."""


class TokenRefused(EngineError, PermissionError):
    """The token or API key is not the server's."""


class UnknownAdapter(EngineError, LookupError):
    """The engine has no adapter of this name; the text lists its adapters."""


class StaleHandle(EngineError, LookupError):
    """The memory that a rank exported for its weights has moved or was freed."""


class ChangedBySleep(EngineError):
    """After a sleep the engine computes different results; it samples nothing until it is built again."""


class HandleRefused(EngineError, OSError):
    """A process cannot read tensors of another process in place, or the engine lends no weights that fit."""


class WeightMismatch(VectorLMError, ValueError):
    """Trainer and engine disagree on parameter names or shapes."""


class ChecksumMismatch(WeightMismatch):
    """After an update the engine does not hold the weights that were sent."""


class NonFiniteWeights(WeightMismatch, ArithmeticError):
    """The trainer's weights contain NaN or infinity; the engine did not receive them."""


class RewardError(VectorLMError, RuntimeError):
    """A reward function raised an error or timed out."""


class RolloutError(VectorLMError, RuntimeError):
    """An environment failed in the middle of a rollout."""


class WorkerLost(VectorLMError, RuntimeError):
    """A process that ran the user's code exited, or was killed after a time-out."""


class WorkersDied(VectorLMError, RuntimeError):
    """The processes that run the user's code die again and again."""


class NonFiniteLoss(VectorLMError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite."""


class ExactnessError(VectorLMError, ArithmeticError):
    """In exact mode, a log-probability of the trainer has other bits than the engine's."""


class CheckpointError(VectorLMError, RuntimeError):
    """A checkpoint is incomplete, or belongs to another run."""
