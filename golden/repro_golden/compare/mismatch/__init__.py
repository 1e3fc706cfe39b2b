"""The train/rollout mismatch: its numbers, the bounds of a case, and what moved between two traces."""
