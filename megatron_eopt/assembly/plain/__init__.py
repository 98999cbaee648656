"""Checkpoints of optimizers that hold whole parameters."""
