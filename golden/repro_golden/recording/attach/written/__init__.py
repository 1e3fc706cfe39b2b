"""What is written: the program's own files and numbers, which are read, and our raw records."""
