"""Whole searches, from both endpoints to the confirmed culprit."""
