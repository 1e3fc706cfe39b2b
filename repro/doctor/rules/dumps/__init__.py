"""Rollout and train dumps."""
