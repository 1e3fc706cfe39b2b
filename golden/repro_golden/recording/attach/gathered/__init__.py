"""The instrument's side: a command is run, and what its processes wrote becomes one trace."""
