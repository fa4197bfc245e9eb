"""Where the daemon's configuration comes from: a file, the environment, flags; checked, shown and read again."""
