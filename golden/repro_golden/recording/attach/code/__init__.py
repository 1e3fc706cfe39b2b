"""Whose code a process runs: its working tree, what was installed of it, and what it met of others."""
