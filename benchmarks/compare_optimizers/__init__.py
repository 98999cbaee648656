"""Held-out losses of the quickstart with several optimizers, learning rates and seeds."""
