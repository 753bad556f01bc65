"""A chat with a calculator: the policy may call a tool before it answers.

In a config: ``rl.environment: examples/calculator_chat.py:Calculator`` and the reward
``examples/calculator_chat.py:is_right``. `examples/make_chats.py` writes the questions and a model to start from.
"""


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


class Calculator:
    """An environment with a tool; a message without a tool call ends the rollout."""

    tools = (add,)

    def step(self, message) -> None:
        """Return None, because the message is the answer."""


def is_right(completion, messages, answer) -> float:
    """Return 1.0 if the last message is the answer, else 0.0."""
    return float(messages[-1]["content"] == str(answer))
