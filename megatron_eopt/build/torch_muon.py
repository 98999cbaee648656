"""Continuing a run of ``torch.optim.Muon``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.storage.dtensors import local_of


@torch.no_grad()
def import_torch_muon(
    optimizer: ShardedOptimizer,
    state_dict: Mapping[str, Any],
    params: Sequence[str] | None = None,
) -> None:
    """Take the momenta out of a ``torch.optim.Muon`` state dict; collective.

    Both keep the same moving average, so that nothing has to be converted. Settings are not taken
    over: they come from the configuration.

    Args:
        optimizer: Where the momenta go.
        state_dict: What ``torch.optim.Muon.state_dict()`` returned, or torch's
            ``get_optimizer_state_dict``. Momenta are whole tensors or DTensors.
        params: Names of the parameters in the order in which ``torch.optim.Muon`` got them, where
            the state dict has neither names nor ``param_names``.

    Raises:
        ConfigurationError: If names are unknown, a momentum is missing or has another shape.
    """
    momenta = _momenta_by_name(state_dict, params)
    optimizer.unpack()
    targets = {
        name: (param, optimizer.state[param][MOMENTUM])
        for param, name in optimizer.names.items()
        if MOMENTUM in optimizer.state[param] and param.dim() > 1
    }
    if odd := sorted(momenta.keys() - targets.keys()):
        rule = "are no parameters with a momentum of this optimizer"
        raise ConfigurationError("state_dict", odd[:8], rule, "Route them to Muon here too")
    if missing := sorted(targets.keys() - momenta.keys()):
        rule = "have no momentum in it"
        raise ConfigurationError("state_dict", missing[:8], rule, "Route them elsewhere here too")
    for name, (param, target) in targets.items():
        value = momenta[name]
        if value.shape != param.shape:
            rule = f"must have the shape {tuple(param.shape)}"
            raise ConfigurationError(name, tuple(value.shape), rule, "Load a fitting one")
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(param, DTensor):
            # every rank has the whole tensor and cuts it for itself
            mesh, placements = param.device_mesh, param.placements
            value = distribute_tensor(value, mesh, placements, src_data_rank=None)
        local_of(target).copy_(local_of(value))
    optimizer.pack()


def _momenta_by_name(
    state_dict: Mapping[str, Any], params: Sequence[str] | None
) -> dict[str, Tensor]:
    groups = state_dict["param_groups"]
    order = [key for group in groups for key in group["params"]]
    own = [name for group in groups for name in group.get("param_names", ())]
    names = params or own or order
    if len(names) != len(order) or not all(isinstance(name, str) for name in names):
        rule = f"must name the {len(order)} parameters of the state dict, in their order"
        raise ConfigurationError("params", params, rule, "Pass the names torch.optim.Muon got")
    state = state_dict["state"]
    return {
        name: state[key][MOMENTUM]
        for name, key in zip(names, order, strict=True)
        if MOMENTUM in state.get(key, ())
    }
