"""The training side: what runs in the training process."""

if __name__ != "everstep.hook":
    raise ImportError(f"imported as {__name__!r}: the repository root is on sys.path; use everstep.hook")
