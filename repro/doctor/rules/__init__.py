"""The rules by subject: a file for each family, in a folder where there are several; `catalogue` finds them."""
