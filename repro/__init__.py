"""Golden runs, replay and bisect for RL post-training."""

__version__ = "0.1.0"
