"""Ways to store weights and optimizer state: which shards a rank has, gradients in, weights out.

A data-parallel rank stores whole weights (``replicated``), ZeRO-1 fragments of Megatron's buffers
(``zero1``, also if DDP all-reduces gradients), DTensors (``dtensors``), or plain tensors that are
parts of parameters (``placed``), for storages that other packages add.
"""
