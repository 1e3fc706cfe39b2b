"""What lives in the process at the end of a step, and what it is called: it is found and read, and never changed."""
