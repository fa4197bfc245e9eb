"""Loaders for frameworks that take loaders apart, and sources in other libraries' form."""
