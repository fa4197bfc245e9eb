"""The service manager's FD store: arenas, and what was sealed in them, outlive this process."""
