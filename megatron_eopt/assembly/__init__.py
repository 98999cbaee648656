"""From a configuration and a model to routed parameter groups and their optimizers."""
