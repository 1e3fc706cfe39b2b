"""Recorded rollouts and golden runs, as files that DVC tracks."""
