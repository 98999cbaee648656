"""How evenly matrices are dealt out, beside megatron-core's padded layer-wise layout."""
