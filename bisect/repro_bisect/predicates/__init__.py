"""What makes a probe BAD."""
