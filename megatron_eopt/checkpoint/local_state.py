"""This rank's state dict in torch's form; loads with the same optimizers at the same layout."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.checkpoint.groups import children_of, inner_of, match_all
from megatron_eopt.checkpoint.migration import begin_together, missing_state
from megatron_eopt.checkpoint.optimizer_state import adopt_common, prepare
from megatron_eopt.optimizers.driver import set_step
from megatron_eopt.optimizers.nested_state import leaves, put
from megatron_eopt.optimizers.sharded import ShardedOptimizer
from megatron_eopt.optimizers.stepper import Stepper
from megatron_eopt.storage.dtensors import local_of

MAINS = "fp32_from_fp16_params"
"""Key of the main weights in the state of megatron-core's wrapper for 16-bit parameters."""


def save(stepper: Stepper, main: str | None) -> dict[str, Any]:
    """Return the state of one optimizer of a chain, of tensors and plain Python values only.

    For ZeRO-1 fragments it has groups, steps and loss scale only. As in megatron-core, groups do
    not name the main optimizer.
    """
    storage: Any = stepper.storage
    if storage.is_stub_optimizer:
        return {}
    if not isinstance(storage, DistributedOptimizer):
        prepare([stepper], is_loading=False)
    result: dict[str, Any] = storage.state_dict()
    for group in inner_of(result)["param_groups"]:
        if group.get("optimizer") == main:
            group.pop("optimizer", None)
    if MAINS in result:
        # aliases without attributes, which torch.load with weights_only=True could not read
        result[MAINS] = [[item.detach() for item in group] for group in result[MAINS]]
    return result


def load(steppers: Sequence[Stepper], state: Any, fresh: frozenset[str]) -> None:
    """Load what :func:`save` returned for each optimizer of a chain.

    Groups keep this run's schedule. State of the kinds ``fresh`` may be missing.

    Raises:
        ConfigurationError: If optimizers or groups differ, or state is missing.
    """
    parts = children_of(state) or [{} for _ in steppers]
    if len(parts) != len(steppers):
        raise _another(f"the state of {len(parts)} optimizers", len(steppers))
    for stepper, part in zip(steppers, parts, strict=True):
        if not stepper.storage.is_stub_optimizer:
            _load(stepper, part, fresh)


@torch.no_grad()
def _load(stepper: Stepper, part: Mapping[str, Any], fresh: frozenset[str]) -> None:
    prepare([stepper], is_loading=True)
    storage: Any = stepper.storage
    optimizer = storage.optimizer
    groups, saved = optimizer.param_groups, inner_of(part).get("param_groups", ())
    twins = match_all(saved, groups)
    states = inner_of(part).get("state", {})
    found: dict[Tensor, dict[str, Any]] = {}
    for group, twin in zip(groups, twins, strict=True):
        numbers = saved[twin]["params"]
        if len(numbers) != len(group["params"]):
            raise _another(f"{len(numbers)} parameters of a group", len(group["params"]))
        pairs = zip(group["params"], numbers, strict=True)
        found |= {param: states.get(number, {}) for param, number in pairs}
    may_lack = {id(main): driver.dispensable for driver, _, main in stepper.stepped()}
    missing = []
    for number, (param, values) in enumerate(found.items()):
        own = optimizer.state[param]
        lacking = own.keys() - values.keys() - may_lack[id(param)]
        shape = tuple(param.shape)
        missing += [f"parameter {number} of shape {shape}: {k}" for k in sorted(lacking - fresh)]
        taken = (own.keys() & values.keys()) - begin_together(own, lacking)
        found[param] = {kind: values[kind] for kind in taken}
    if missing:
        raise missing_state(missing)
    adopt_common([stepper], part)
    if isinstance(optimizer, ShardedOptimizer):
        hand_over(optimizer, found)
    else:
        for param, values in found.items():
            if not values:
                set_step(optimizer.state[param], 0)
            for kind, value in values.items():
                _copy(value, optimizer.state[param], kind)
    for mains, twin in zip(getattr(storage, "fp32_from_float16_groups", ()), twins, strict=False):
        its = part[MAINS][twin] if MAINS in part else ()
        if [local_of(a).shape for a in mains] != [local_of(b).shape for b in its]:
            raise _another(f"{len(its)} main weights ({MAINS}) of a group", len(mains))
        for target, value in zip(mains, its, strict=True):
            local_of(target).copy_(local_of(value))


def hand_over(optimizer: ShardedOptimizer, states: Mapping[Tensor, Mapping[str, Any]]) -> None:
    """Load state of shards and of whole matrices into an optimizer; collective."""
    loaded = {id(param): {**optimizer.state[param], **states[param]} for param in states}
    groups = [{**g, "params": [id(param) for param in g["params"]]} for g in optimizer.param_groups]
    optimizer.load_state_dict({"state": loaded, "param_groups": groups})


def _another(found: str, wanted: int) -> ConfigurationError:
    return ConfigurationError(
        "state_dict",
        found,
        f"does not match this rank, which needs {wanted} of them, with equal shapes",
        "Resume with the model, precision, optimizers and parallel layout of the run that wrote "
        "it, or from a torch_dist checkpoint",
    )


def _copy(value: Any, own: dict[str, Any], kind: str) -> None:
    """Copy a state value, which may be nested, into ``own``.

    Raises:
        ConfigurationError: If the shapes differ.
    """
    saved = dict(leaves(value, (kind,)))
    for path, mine in list(leaves(own[kind], (kind,))):
        its = torch.as_tensor(saved.get(path, ()))
        shape = torch.as_tensor(mine).shape
        if [n for n in its.shape if n != 1] != [n for n in shape if n != 1]:
            raise ConfigurationError(
                "state_dict",
                f"{kind} of shape {tuple(its.shape)}",
                f"must have shape {tuple(shape)}",
                "Resume with the settings and tensor-parallel size of the run that wrote the "
                "checkpoint, or load no optimizer state (--no-load-optim)",
            )
        if isinstance(mine, Tensor):
            mine.copy_(its.reshape(shape))
        else:
            put(own, path, type(mine)(saved[path]))
