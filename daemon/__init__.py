"""The node service and the command line: owns the memory that trainers copy into, writes it to the devices."""

if __name__ != "everstep.daemon":
    raise ImportError(f"imported as {__name__!r}: the repository root is on sys.path; use everstep.daemon")
