"""`repro rollout`: its group, its other commands, and what they read."""
