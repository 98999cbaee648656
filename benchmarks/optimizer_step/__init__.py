"""How long one optimizer step takes, against megatron-core and emerging-optimizers."""
