"""Prompt data and reward functions."""
