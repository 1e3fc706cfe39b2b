"""Launches: shell scripts, Python launchers and argv, read into what they would start."""
