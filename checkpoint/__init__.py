"""Everything between a slot of shared memory and the devices: layout, formats, engines, commit, recovery."""

if __name__ != "everstep.checkpoint":
    raise ImportError(
        f"imported as {__name__!r}: the repository root is on sys.path; use everstep.checkpoint"
    )
