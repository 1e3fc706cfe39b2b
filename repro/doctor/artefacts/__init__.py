"""What a doctor can look at: a class for each kind, and how it is read from files."""
