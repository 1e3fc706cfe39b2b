"""A launch's own command line."""
