"""A calculator for multi-turn rollouts: it evaluates expressions between <calc> and </calc> for the policy.

In a config: ``rl.environment: examples/calculator_tool.py:Calculator``, with ``stop: ["</calc>"]`` and
``include_stop_str_in_output: True`` in ``rl.sampling_params``. A turn then ends with a call of the tool.
"""

from vectorlm.rl.rewards.countdown import evaluate

BEGIN, END = "<calc>", "</calc>"


class Calculator:
    """The calculator of a rollout; it answers a turn that ends with a call, and otherwise ends the rollout."""

    def __init__(self, **columns) -> None:
        """Accept the prompt's columns, which a calculator does not need."""

    def respond(self, text: str) -> str | None:
        """Return the value of the last expression, ``=?;`` if it is invalid, or None if there is no call."""
        if not text.endswith(END) or BEGIN not in text:
            return None
        try:
            return f"={evaluate(text.removesuffix(END).rpartition(BEGIN)[2])[0]};"
        except ValueError:
            return "=?;"
