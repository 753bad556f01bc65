"""The exception tree of the library.

Every error the library raises on purpose stands on this tree, and each leaf also inherits the built-in
exception that it refines, so ``except ValueError`` keeps working::

    VectorLMError
     ├─ ConfigError (ValueError)            a setting is unknown, of the wrong type or impossible
     ├─ DatasetError (ValueError)           a dataset is missing, empty or lacks a column
     ├─ LaunchError (RuntimeError)          the ranks could not be started
     ├─ RankFailed (RuntimeError)           a rank raised or died; carries that rank's own traceback
     ├─ HandoffTimeout (TimeoutError)       a rank did not reach a meeting point within the deadline
     ├─ RankMismatch (ValueError)           ranks called the same method with different arguments
     ├─ OutOfTurn (RuntimeError)            training or sampling began while the devices were the other's
     ├─ EngineError (RuntimeError)          the engine raised; carries the engine's own traceback
     │   ├─ EngineDied (ConnectionError)    the sampler process is gone
     │   └─ EngineTimeout (TimeoutError)    the sampler process is silent past the deadline
     ├─ WeightMismatch (ValueError)         trainer and engine disagree on parameter names or shapes
     │   └─ ChecksumMismatch                the engine does not hold the weights that were sent
     ├─ RewardError (RuntimeError)          a reward function raised or ran out of time
     ├─ NonFiniteLoss (ArithmeticError)     the loss or the gradient norm is NaN or infinite
     └─ CheckpointError (RuntimeError)      a checkpoint is incomplete or of another run

All of them pickle: the text is the whole state, so they cross process borders unchanged.
"""


class VectorLMError(Exception):
    """Root of all errors raised by this library."""


class ConfigError(VectorLMError, ValueError):
    """A setting is unknown, of the wrong type or impossible."""


class DatasetError(VectorLMError, ValueError):
    """A dataset is missing, empty or lacks a column."""


class LaunchError(VectorLMError, RuntimeError):
    """The ranks could not be started."""


class RankFailed(VectorLMError, RuntimeError):
    """A rank raised or died; the text holds that rank's own error and traceback."""


class HandoffTimeout(VectorLMError, TimeoutError):
    """A rank did not reach a meeting point within the deadline."""


class RankMismatch(VectorLMError, ValueError):
    """Ranks called the same collective method with different arguments."""


class OutOfTurn(VectorLMError, RuntimeError):
    """Training or sampling began while the devices were the other's."""


class EngineError(VectorLMError, RuntimeError):
    """The engine raised; the text holds the engine's own traceback."""


class EngineDied(EngineError, ConnectionError):
    """The sampler process is gone."""


class EngineTimeout(EngineError, TimeoutError):
    """The sampler process has been silent for longer than the deadline."""


class WeightMismatch(VectorLMError, ValueError):
    """Trainer and engine disagree on parameter names or shapes."""


class ChecksumMismatch(WeightMismatch):
    """After an update the engine does not hold the weights that were sent."""


class RewardError(VectorLMError, RuntimeError):
    """A reward function raised, or ran out of time."""


class RolloutError(VectorLMError, RuntimeError):
    """An environment failed in the middle of a rollout."""


class NonFiniteLoss(VectorLMError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite."""


class CheckpointError(VectorLMError, RuntimeError):
    """A checkpoint is incomplete, or belongs to another run."""
