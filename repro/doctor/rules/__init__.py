"""The rules: a file for each family, in a folder by subject; `catalogue` finds them."""
