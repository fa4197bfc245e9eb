"""What is said again and again stands in the log the first time, the 10th, the 100th and so on."""


def is_said(count: int) -> bool:
    """Tell whether the line that comes for the `count`-th time is one of those."""
    return count == 10 ** (len(str(count)) - 1)
