"""The node's cache of samples: arenas that the daemon fills and every reader of their user maps."""
