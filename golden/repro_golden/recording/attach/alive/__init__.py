"""What lives in the process at the end of a step, and what it is called: found, watched and read; no value changes."""
