"""What a daemon does with its devices: stores, transfers, persisting, restoring, verifying, scrubbing."""
