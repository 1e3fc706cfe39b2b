"""Runs of a subject in processes of their own, of one rank or of many."""
