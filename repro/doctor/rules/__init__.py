"""The rules, a file each, in a folder by subject; `catalogue` finds them."""
