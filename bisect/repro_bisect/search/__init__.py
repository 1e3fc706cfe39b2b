"""Which point to try next, from the verdicts so far. Pure: no git, no files, no processes."""
