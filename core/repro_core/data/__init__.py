"""Rollout files, the task they come from, and what an update consumed."""
