"""When a training step ends: optimizers, passes that none of them follows, rounds of several, ranks that differ."""
