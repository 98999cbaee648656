"""Optimizer state in checkpoints, in a form that does not depend on storage or parallel layout.

Each state tensor (``saved_state``) is saved as boxes of the unsharded parameter
(``parameter_space``), under ``keys``. ``optimizer_state`` adds groups and step counts.

=============================  =====================================================================
``torch_dist``, by parameter   ``requests``; loads are matched first by ``matching``, ``migration``
``torch_dist``, by bucket      written by megatron-core for Adam; read by ``requests``
``torch``                      ZeRO-1 fragments: ``rank_files``; whole parameters: ``local_state``
``fsdp_dtensor``               ``fsdp_dtensor``
=============================  =====================================================================

``trainer`` adapts the loading functions of Megatron-LM's trainer.
"""
