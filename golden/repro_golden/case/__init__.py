"""Case files and their tables, and what identifies the machine that a run was made on."""
