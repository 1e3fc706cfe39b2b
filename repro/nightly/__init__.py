"""Nightly runs: what they compare with, what they check, what is kept of them."""
