"""Shared preparation: several jobs on a node prepare each batch once between them."""
