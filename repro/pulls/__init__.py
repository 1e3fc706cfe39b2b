"""Reports on pull requests."""
