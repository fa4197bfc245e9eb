"""Whether this process is a script under `everstep analyze`: nothing of it may reach a run, a store or a group."""

import os

ANALYSIS_VARIABLE = "EVERSTEP_ANALYSIS"


def mark_analysed() -> None:
    """Say so of this process and of all that it starts."""
    os.environ[ANALYSIS_VARIABLE] = "1"


def is_analysed() -> bool:
    """Tell whether it was said."""
    return bool(os.environ.get(ANALYSIS_VARIABLE))
