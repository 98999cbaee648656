"""Optimizer state in checkpoints, in a form that does not depend on storage or parallel layout.

Whoever changes a format reads ``storage``, which says what a rank has, but no algorithm: state is
known by its kinds. Whose state continues, one module decides for all formats: ``state.rule``.

=============================  =====================================================================
``torch_dist``, by parameter   ``requests``; loads are matched first by ``matching``
``torch_dist``, by bucket      megatron-core's Adam; found by ``buckets``
``torch``, state dicts         ``local_state``, and ``fsdp2`` for own loops, by ``state``
``fsdp_dtensor``               ``fsdp_dtensor``
=============================  =====================================================================

``trainer`` adapts the loading functions of Megatron-LM's trainer.

A save of ``torch_dist`` reads from ``optimizer_state.requested`` down: ``requests`` lists all
values (``saved_state``), and each becomes ``ShardedTensor`` pieces (``parameter_space``) under its
``keys``; ``optimizer_state`` adds groups and step counts. A load makes the same requests, with
state of the right shape to read into. Before megatron-core reads, ``matching`` reads a
``catalogue`` of the checkpoint, and each request chooses its ``sources`` in it. Afterwards the
chain's ``load_state_dict`` writes what was not read in place, through ``optimizer_state.load``.

The types of a load:

* ``Writer``: the optimizer of a saved or present group, and what gives its state a meaning.
* ``SavedState``: what a checkpoint has of one parameter, and who may have written it.
* ``LoadReport``: the outcomes of all parameters, and what the log or an error says of them.
* ``SavedStateDict``: a state dict, by names of parameters.
* ``Saved``: what one key of a checkpoint holds.
* ``Catalogue``: all values and groups of a checkpoint, read once.
* ``ParameterSpace``: where a parameter's elements are in a checkpoint's tensors.
* ``Source``: a box of what is asked for that a checkpoint has; ``MatrixSource``: of a matrix.
* ``StateValue``: one value on this rank, with its pieces; ``ParameterLocation``: its parameter.
* ``StateRequests``: all of them, in a sharded state dict.
"""
