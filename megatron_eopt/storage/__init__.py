"""What a rank stores of each parameter: what storages and update rules agree on.

A storage says it in shards (:mod:`~megatron_eopt.storage.shard`) and has the methods of
:class:`~megatron_eopt.megatron_core.stored_weights.StoredWeights`. The storages themselves stand in
:mod:`megatron_eopt.wrappers`: ``replicated``, ``zero1``, ``torch_fsdp2``, ``megatron_fsdp``.
Whoever changes a meaning here reads ``optimizers`` and ``wrappers``, which agree on it.
"""
