"""A tool for multi-turn rollouts: what stands between <calc> and </calc> is worked out for the policy.

In a config: ``rl.environment: examples/calculator_tool.py:Calculator``, with ``stop: ["</calc>"]`` and
``include_stop_str_in_output: True`` among ``rl.sampling_params``, so that a turn ends where the tool is asked.
"""

from vectorlm.rl.rewards.countdown import evaluate

BEGIN, END = "<calc>", "</calc>"


class Calculator:
    """One rollout's calculator; it answers a turn that ends with a question, and ends the rollout otherwise."""

    def __init__(self, **columns) -> None:
        """Take the question's columns, which a calculator does not need."""

    def respond(self, text: str) -> str | None:
        """Return the value of the last expression, or why there is none."""
        if not text.endswith(END) or BEGIN not in text:
            return None
        try:
            return f"={evaluate(text.removesuffix(END).rpartition(BEGIN)[2])[0]};"
        except ValueError:
            return "=?;"
