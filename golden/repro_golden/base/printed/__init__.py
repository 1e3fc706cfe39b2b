"""Metrics in what training programs print for people: lines, dicts, and names that tell of the machine."""
