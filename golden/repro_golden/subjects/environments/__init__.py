"""The Python environment that a version of a subject runs in: found, built, kept."""
