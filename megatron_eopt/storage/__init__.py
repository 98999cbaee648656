"""Ways to keep weights: each says which shards this rank has, and hands gradients in, weights out.

Over data parallelism weights are whole (``replicated``), in ZeRO-1 fragments of Megatron's buffers
(``sharded``, also where DDP has all-reduced gradients), or DTensors (``dtensors``).
"""
