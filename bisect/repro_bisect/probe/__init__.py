"""One point of an axis, run and kept: worktrees, executors, the journal."""
