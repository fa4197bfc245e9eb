"""Where samples come from: stored formats as one small protocol, read at random by number."""
