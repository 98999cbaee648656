"""Count what an optimizer step computes and sends, against megatron-core's Muon."""
