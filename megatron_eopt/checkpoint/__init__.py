"""Optimizer state in checkpoints: one form for every storage, in which no layout shows.

Values of state (``saved_state``) have boxes of the unsharded parameter (``parameter_space``), under
names of ``keys``. ``requests`` holds those of a chain; ``optimizer_state`` adds groups and steps.

=============================  =====================================================================
``torch_dist``, by parameter   ``requests``; a load is matched first: ``matching``, ``migration``
``torch_dist``, by bucket      megatron-core writes it of Adam; read by ``requests``
``torch``                      fragments: ``rank_files``; whole parameters: ``local_state``
``fsdp_dtensor``               ``fsdp_dtensor``
=============================  =====================================================================

``trainer`` is what Megatron-LM's trainer needs for all of that.
"""
