"""The repository that is guarded, read through git. Nothing here changes it."""
