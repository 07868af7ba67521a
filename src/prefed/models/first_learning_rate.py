"""The learning rate to try first, from the size of a model."""


def first_rate(width: int) -> float:
    """Learning rate to try first for short runs of Adam on LoRA: 0.6 / width, to one digit.

    Args:
        width: the hidden size.

    >>> first_rate(256), first_rate(576), first_rate(4096)
    (0.002, 0.001, 0.0001)
    """
    return float(f"{0.6 / width:.0e}")
