"""Continuing a run of ``torch.optim.Muon``."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MOMENTUM
from megatron_eopt.math.coefficients import resolve_coefficients
from megatron_eopt.optimizers.muon_driver import MuonDriver
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.stores.dtensors import local_of

logger = logging.getLogger(__name__)


@torch.no_grad()
def import_torch_muon(
    optimizer: ShardedOptimizer,
    state_dict: Mapping[str, Any],
    params: Sequence[str] | None = None,
) -> None:
    """Take the momenta out of a ``torch.optim.Muon`` state dict; collective.

    Both keep the same moving average, so that nothing has to be converted. Settings are not taken
    over: they come from the configuration, and those that differ are warned of.

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
    _warn_of_other_settings(optimizer, state_dict["param_groups"])


def _warn_of_other_settings(optimizer: ShardedOptimizer, groups: Sequence[Any]) -> None:
    driver = next((d for d in optimizer.drivers if isinstance(d, MuonDriver)), None)
    if driver is None:
        return
    how = driver.optimizer.orthogonalization
    ours = {
        "momentum": optimizer.groups_of(driver)[0]["momentum"],
        "nesterov": driver.optimizer.nesterov,
        "ns_steps": how.steps,
        "ns_coefficients": resolve_coefficients(how.coefficients, how.steps),
    }
    for name, theirs in ((name, group[name]) for group in groups for name in ours if name in group):
        of_steps = (tuple(theirs),) * how.steps if name == "ns_coefficients" else theirs
        if of_steps != ours[name]:
            text = "torch.optim.Muon had %s=%s, which now is %s: another optimizer"
            logger.warning(text, name, theirs, ours[name])


def _momenta_by_name(
    state_dict: Mapping[str, Any], params: Sequence[str] | None
) -> dict[str, Tensor]:
    groups = state_dict["param_groups"]
    order = [key for group in groups for key in group["params"]]
    if order and all(isinstance(key, str) for key in order):
        given: Sequence[str] = order
    elif params is not None:
        given = params
    else:
        given = [name for group in groups for name in group.get("param_names", ())]
    if len(given) != len(order):
        rule = f"must name the {len(order)} parameters of the state dict, in their order"
        raise ConfigurationError("params", params, rule, "Pass the names torch.optim.Muon got")
    names = dict(zip(order, given, strict=True))
    return {
        names[key]: state[MOMENTUM]
        for key, state in state_dict["state"].items()
        if MOMENTUM in state
    }
