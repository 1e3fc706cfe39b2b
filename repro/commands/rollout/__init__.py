"""`repro rollout`: one module per command."""
