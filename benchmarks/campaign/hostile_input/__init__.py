"""Hostile inputs by family; `benchmarks/campaign/hostile.py` tries them. Nothing here is ever run but by repro."""
