"""Public names to add a storage or an update rule, and the layer-wise distributed optimizer."""

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from megatron_eopt.config.registry import EmergingOptimizerEntry
    from megatron_eopt.megatron_core.stored_weights import StoredWeights
    from megatron_eopt.optimizers.matrix_sums_rule import MatrixSumsRule
    from megatron_eopt.optimizers.muon_rule import MuonRule
    from megatron_eopt.optimizers.update_rule import UpdateRule
    from megatron_eopt.storage.shard import ParamShard
    from megatron_eopt.wrappers.builders import OptimizerBuildContext, register_storage
    from megatron_eopt.wrappers.layer_wise import LayerWiseDistributedOptimizer
    from megatron_eopt.wrappers.replicated import build_replicated

__all__ = [
    "EmergingOptimizerEntry",
    "LayerWiseDistributedOptimizer",
    "MatrixSumsRule",
    "MuonRule",
    "OptimizerBuildContext",
    "ParamShard",
    "StoredWeights",
    "UpdateRule",
    "build_replicated",
    "register_storage",
]
