"""What computes a model: plain torch on one process, or megatron-core on many."""
