"""The arithmetic of the RL step: advantages, losses, KL, batches. Columns in, columns out."""
