"""What the rules of checkpoints share: names of tensors, folders that a launch names, the INT4 list simulated."""
