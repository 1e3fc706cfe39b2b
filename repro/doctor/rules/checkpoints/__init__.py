"""Checkpoints of Megatron and Hugging Face."""
