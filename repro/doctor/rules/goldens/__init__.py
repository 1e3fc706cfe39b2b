"""Golden runs and traces."""
