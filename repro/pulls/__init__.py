"""Pull requests: two commits replayed side by side, the report on them, and the comment that is posted."""
