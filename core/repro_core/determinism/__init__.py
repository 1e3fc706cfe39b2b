"""Every switch that decides bits, and the proof that it took effect."""
