"""Logs, read once in bounded memory, and what rules ask of their lines."""
