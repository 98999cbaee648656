"""The optimizers: torch classes, and update rules that run them on sharded parameters."""
