"""Rollout dumps: the forms they had, what is wrong with them, and the way to recorded rollouts and back."""

from __future__ import annotations
