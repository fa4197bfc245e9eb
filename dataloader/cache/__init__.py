"""The node's cache from a reader's side: hits from shared memory, misses from the source, fills by the daemon."""
