"""Names, identities and errors: what every folder may import."""

if __name__ != "everstep.core":
    raise ImportError(f"imported as {__name__!r}: the repository root is on sys.path; use everstep.core")
