"""Optimizer state in checkpoints, in a form that does not depend on storage or parallel layout.

Whoever changes a format reads ``storage``, which says what a rank has, but no algorithm: state is
known by its kinds.

Each state tensor (``saved_state``) is saved as boxes of the unsharded parameter
(``parameter_space``), under ``keys``. ``optimizer_state`` adds groups and step counts.

=============================  =====================================================================
``torch_dist``, by parameter   ``requests``; loads are matched first by ``matching``, ``migration``
``torch_dist``, by bucket      written by megatron-core for Adam; found by ``buckets``
``torch``                      ZeRO-1 fragments: ``rank_files``; whole parameters: ``local_state``
``fsdp_dtensor``               ``fsdp_dtensor``
=============================  =====================================================================

``trainer`` adapts the loading functions of Megatron-LM's trainer.

A save of ``torch_dist`` reads from ``optimizer_state.requested`` down: ``requests`` lists all
values (``saved_state``), and each becomes ``ShardedTensor`` pieces (``parameter_space``). A load
makes the same requests, with state of the right shape to read into. Before megatron-core reads,
``matching`` reads a ``catalogue`` of the checkpoint, and each request chooses its ``sources`` in it
(``contents``, ``migration``), by the decisions of ``continuation``.
Afterwards the chain's ``load_state_dict`` writes what was not read in place, through
``optimizer_state.load``.
"""
