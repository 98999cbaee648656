"""ZeRO-1: weights and state in fragments of Megatron's flat buffers, also if DDP all-reduces.

Whoever changes it reads megatron-core's buffers and ``storage``, and no other storage.
"""
