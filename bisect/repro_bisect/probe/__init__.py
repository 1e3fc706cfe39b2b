"""One point of an axis, run and kept: requests, executors, the journal."""
