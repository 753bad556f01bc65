"""The reward of configs/pictures_grpo.yaml."""


def is_right(text: str, answer: str) -> float:
    """Return 1 for the answer alone, else 0."""
    return float(text.strip() == answer)
