"""Compare the quickstart's held-out losses between optimizers, learning rates and seeds."""
