"""Ways to store weights and optimizer state: which shards a rank has, gradients in, weights out.

A data-parallel rank stores whole weights (``replicated``), ZeRO-1 fragments of Megatron's buffers
(``sharded``, also if DDP all-reduces gradients), or DTensors (``dtensors``).
"""
