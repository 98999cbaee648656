"""ZeRO-1: weights and state in fragments of Megatron's flat buffers, also if DDP all-reduces."""
