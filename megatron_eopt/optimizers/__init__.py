"""The optimizers themselves."""
