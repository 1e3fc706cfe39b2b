"""The machine that children live on: their processes, disks and time, and what Python's audit events tell."""
