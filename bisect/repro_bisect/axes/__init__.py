"""What can be searched: commits, releases, flags, layouts."""
