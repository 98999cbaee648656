"""Predict memory, communication and time of an optimizer step, without GPUs."""
