"""What one optimizer step computes and sends, against megatron-core and emerging-optimizers."""
