"""What surrounds a launch: variables, packages, the machine."""
