"""The reward of configs/pictures_grpo.yaml."""


def is_right(text: str, answer: str) -> float:
    """Return 1.0 if the text is only the answer, else 0.0."""
    return float(text.strip() == answer)
