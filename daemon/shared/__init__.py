"""Shared preparation: jobs of one user that walk the same order prepare each batch once between them."""
