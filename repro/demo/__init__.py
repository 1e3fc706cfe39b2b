"""The demo: a scratch repository whose history hides a precision regression, and the whole job done on it."""
