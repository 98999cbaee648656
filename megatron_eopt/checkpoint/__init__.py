"""Optimizer state in checkpoints: one form for every storage, in which no layout shows."""
