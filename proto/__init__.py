"""The two wire languages: frames for trainers on the data socket, gRPC for everything else."""

if __name__ != "everstep.proto":
    raise ImportError(f"imported as {__name__!r}: the repository root is on sys.path; use everstep.proto")
