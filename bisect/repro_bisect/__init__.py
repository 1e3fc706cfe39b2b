"""The search for the change that moved the numbers."""
