"""Faults by kind; `benchmarks/campaign/faults.py` tries them."""
