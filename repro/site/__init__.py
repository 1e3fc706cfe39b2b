"""The page of all nights and pull requests: a static site that works from a folder, without a server or a network."""
