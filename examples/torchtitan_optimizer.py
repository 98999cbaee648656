"""Muon in torchtitan, as an optimizer container that torchtitan's configuration can choose.

export PYTHONPATH=examples
torchrun -m torchtitan.train --module torchtitan_optimizer --config llama3_muon ...
"""

from dataclasses import dataclass

from torchtitan.components.checkpointer.utils import canonical_fqn
from torchtitan.components.optimizer import OptimizersContainer

from megatron_eopt import build_optimizer, load_optimizer_config


class MuonOptimizers(OptimizersContainer):
    """One optimizer for each part of the model."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """The YAML file with the optimizer's settings."""

        file: str = "examples/muon_on_fsdp2.yaml"

    def __init__(self, config, *, model_parts):
        settings = load_optimizer_config(config.file)
        self.model_parts = model_parts
        self.optimizers = [build_optimizer(part, settings) for part in model_parts]
        groups = [(item, group) for item in self.optimizers for group in item.param_groups]
        for optimizer, group in groups:
            # torchtitan saves optimizer state under these names
            group["param_names"] = [canonical_fqn(optimizer.names[p]) for p in group["params"]]
        self._post_init([param for _, group in groups for param in group["params"]])


def llama3_muon():
    """Return torchtitan's small Llama 3 with this optimizer."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.optimizer = MuonOptimizers.Config()
    return config
