"""The repository that is guarded, read through git, and worktrees of it. Nothing here changes the checkout."""
