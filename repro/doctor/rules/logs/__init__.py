"""What programs print before they die."""
