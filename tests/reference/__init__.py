"""Slow, plain float64 statements of what the optimizers compute: the oracle of the tests."""
