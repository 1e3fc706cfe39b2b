"""The first training step, and what tells it from later ones."""
