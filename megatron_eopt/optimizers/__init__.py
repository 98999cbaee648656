"""The optimizers: torch classes, and drivers that run them on sharded parameters."""
