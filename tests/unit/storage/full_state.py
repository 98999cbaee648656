"""The whole state of a run, put together from what its ranks would save."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, apply_factories, is_main_replica
from megatron.core.optimizer import OptimizerConfig, ParamKey, get_standard_config_overrides
from megatron.core.optimizer import get_megatron_optimizer as megatrons_factory
from torch import distributed

from megatron_eopt import EmergingOptimizerConfig, checkpoints, get_megatron_optimizer
from megatron_eopt.base.names import STEP
from megatron_eopt.optimizers.whole_matrix_rule import WholeMatrixRule
from megatron_eopt.testing.scene import forget_megatron
from tests.harness.models import copies_of
from tests.unit.storage.runs import DENSE, Run, global_name, inject, make_chunk, set_lr

OPTIMIZERS = {
    "muon": ("muon", {}),
    "muon in 8 bits": ("muon", {"muon_momentum_dtype": "int8"}),
    "adamuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "adamuon"}),
    "normuon": ("adaptive_muon", {"adaptive_muon_moment2_method": "normuon"}),
    "namo": ("adaptive_muon", {"adaptive_muon_moment2_method": "namo"}),
    "soap": ("soap", {}),
    "lion": ("lion", {}),
}
"""Names and fields of the configuration."""


@dataclass(frozen=True)
class Case:
    """A run through the factory, sharded unless its fields say otherwise; see ``Run``."""

    optimizer: str = "muon"
    model: dict[str, Any] = field(default_factory=lambda: {**DENSE})
    parallel: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # of EmergingOptimizerConfig
    form: str = "fully_reshardable"  # in Megatron's words; megatron-core's own optimizers heed it
    frozen: str | None = None
    overrides: dict[str, str] = field(default_factory=dict)  # pattern of names -> optimizer
    float32: str | None = None
    stock: bool = False  # built by megatron-core's own factory

    @property
    def run(self) -> Run:
        names = ("model", "parallel", "ddp", "frozen", "float32")
        return Run(**{name: getattr(self, name) for name in names})


def unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def build(case: Case, prepare: Callable[[Any], None] | None = None) -> tuple[Any, Any]:
    """Return a model, whose weights ``prepare`` changes at first, and its optimizer."""
    chunk = make_chunk(case.run)
    if prepare is not None:
        prepare(chunk)
    elif case.optimizer == "sinkhorn_muon":
        for param in chunk.parameters():
            # doubly stochastic up to its shape, as this optimizer demands
            param.data.fill_(1 / min(param.shape))
    return chunk, optimizer_over(case, [chunk])


def optimizer_over(case: Case, chunks: list[Any]) -> Any:
    fields = {
        "optimizer": case.optimizer,
        "lr": 0.01,
        "min_lr": 0.001,
        "clip_grad": 0.0,
        "bf16": case.model.get("dtype") == torch.bfloat16,
        "use_distributed_optimizer": True,
    }
    config = (OptimizerConfig if case.stock else EmergingOptimizerConfig)(**fields | case.config)
    overrides: Any = get_standard_config_overrides(config)
    overrides |= {ParamKey(name=n): {"optimizer": name} for n, name in case.overrides.items()}
    factory = megatrons_factory if case.stock else get_megatron_optimizer
    optimizer = factory(config, chunks, overrides)
    set_lr(optimizer, config)
    return optimizer


def steps(case: Case, chunk: Any, optimizer: Any, first: int, end: int) -> list[Any]:
    """Do some steps and return what each returned."""
    returned = []
    for step in range(first, end):
        optimizer.zero_grad()
        inject(case.run, chunk, step)
        returned.append(optimizer.step())
    return returned


def sharded(case: Case, chunk: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    metadata = {"distrib_optim_sharding_type": case.form, "chained_optim_avoid_prefix": True}
    model = unwrapped(chunk).sharded_state_dict()
    its = unwrapped(chunk).sharded_state_dict()
    state = optimizer.sharded_state_dict(its, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": state}


def full_state(case: Case, chunk: Any, optimizer: Any) -> dict[str, Any]:
    """Return every tensor and object of a checkpoint, whole, on every rank.

    One rank writes each element. Other copies (of a replicated parameter, of another instance) must
    be equal.
    """
    state = sharded(replace(case, form="fully_reshardable"), chunk, optimizer, is_loading=False)
    apply_factories(state)
    held = [
        replace(item, data=item.data.detach().clone()) if isinstance(item, ShardedTensor) else item
        for item in nested_values(state)
        if isinstance(item, ShardedTensor | ShardedObject)
    ]
    mine = [item for item in held if is_main_replica(item.replica_id)]
    gather_unique: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gather_unique, mine)
    whole: dict[str, Any] = {}
    written: Counter[str] = Counter()
    for item in (item for items in gather_unique for item in items):
        if isinstance(item, ShardedObject):
            whole[item.unique_key] = item.data
            continue
        if item.key not in whole:
            whole[item.key] = torch.full(item.global_shape, torch.nan, dtype=item.dtype)
        whole[item.key][item.global_slice()] = item.data
        written[item.key] += item.data.numel()
    assert all(count == whole[key].numel() for key, count in written.items())
    # with overlap_param_gather, the model's weights are gathered in the next forward pass
    for item in () if chunk.ddp_config.overlap_param_gather else held:
        if isinstance(item, ShardedTensor):
            assert torch.equal(whole[item.key][item.global_slice()], item.data), item.key
    assert not any(torch.isnan(v).any() for v in whole.values() if isinstance(v, torch.Tensor))
    return {key: value for key, value in whole.items() if "_extra_state" not in key}


def counts_of(chunk: Any, optimizer: Any) -> dict[str, int]:
    """Return the step count of each parameter that has one, by its global name, on every rank."""
    sizes = {"layers": chunk.config.num_layers, "experts": chunk.config.num_moe_experts}
    names = {param: global_name(name, sizes) for name, param in chunk.named_parameters()}
    mine: set[tuple[str, int]] = set()
    for link in optimizer.chained_optimizers:
        for item in link.assigned:
            update_rule = item.rule
            with item.groups_and_state() as (groups, state):
                counted = [
                    (n, state[main].get(STEP)) for _, main, n in update_rule.numbered(groups)
                ]
                if isinstance(update_rule, WholeMatrixRule):
                    counted = [(kept.shard, kept.value) for kept in update_rule.counts()]
                mine |= {
                    (names[update_rule.shards[n].param], int(count))
                    for n, count in counted
                    if count is not None
                }
    gather_unique: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(gather_unique, mine)
    pairs = sorted({pair for pairs in gather_unique for pair in pairs})
    found = dict(pairs)
    assert len(found) == len(pairs), "copies and parts of a parameter have different counts"
    return found


def write(case: Case, chunk: Any, optimizer: Any, folder: str | Path) -> None:
    """Save what a run has now; as in the trainer, after the gather that a forward pass would do."""
    if chunk.ddp_config.overlap_param_gather:
        chunk.start_param_sync(force_sync=True)
    Path(folder).mkdir(exist_ok=True)
    dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), str(folder))


def save_one(case: Case, folder: str | Path, count: int = 2) -> dict[str, Any]:
    """Step so often and save; return the whole state."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, count)
    write(case, chunk, optimizer, folder)
    return full_state(case, chunk, optimizer)


def resume(
    case: Case,
    folder: str | Path,
    read: Callable[..., Any] = checkpoints.load,
    prepare: Callable[[Any], None] | None = None,
    make: Callable[..., tuple[Any, Any]] = build,
) -> tuple[Any, Any]:
    """Load into a model of zeros by our function, or by megatron-core's.

    ``make`` builds both; ``prepare`` changes the model before that.
    """
    chunk, optimizer = make(case, prepare)
    for param in chunk.parameters():
        param.data.zero_()
    loaded = read(sharded(case, chunk, optimizer, is_loading=True), str(folder))
    unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    return chunk, optimizer


def write_as(form: str, case: Case, chunk: Any, optimizer: Any, folder: Path) -> Any:
    """Save by ``state_dict`` or with ``dist_checkpointing``.

    Returns what :func:`resume_as` needs besides the files: this rank's weights.
    """
    if form == "state_dict":
        torch.save(optimizer.state_dict(), folder / f"{distributed.get_rank()}.pt")
    else:
        write(case, chunk, optimizer, folder / "distributed")
    return copies_of(unwrapped(chunk))


def resume_as(
    form: str, case: Case, folder: Path, weights: Any, make: Callable[..., tuple[Any, Any]] = build
) -> tuple[Any, Any]:
    """Load what :func:`write_as` has saved into a new model and its optimizer."""
    if form != "state_dict":
        return resume(case, folder / "distributed", make=make)
    chunk, optimizer = make(case, None)
    unwrapped(chunk).load_state_dict(weights, strict=False)
    path = folder / f"{distributed.get_rank()}.pt"
    optimizer.load_state_dict(torch.load(path, weights_only=True))
    return chunk, optimizer


def save(cases: list[Case], folder: str) -> list[dict[str, Any]]:
    """For each case step twice and save; return the whole states."""
    states = []
    for number, case in enumerate(cases):
        states.append(save_one(case, Path(folder, str(number))))
        forget_megatron()
    return states if distributed.get_rank() == 0 else []


def stopped(cases: list[Case], folder: str, end: int = 4) -> tuple[list[Any], list[Any]]:
    """For each case do some steps, saving after two; return the states then and at the end."""
    saved, whole = [], []
    for number, case in enumerate(cases):
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        write(case, chunk, optimizer, Path(folder, str(number)))
        saved.append(full_state(case, chunk, optimizer))
        steps(case, chunk, optimizer, 2, end)
        whole.append(full_state(case, chunk, optimizer))
        forget_megatron()
    return saved, whole


def interrupted(cases: list[Case], folder: str) -> tuple[list[Any], list[Any]]:
    """Do the same, and resume; return both final states of each case."""
    _, whole = stopped(cases, folder)
    return whole, load(cases, folder, further=2)


def load(
    cases: list[Case], folder: str, further: int = 0, read: Any = dist_checkpointing.load
) -> list[dict[str, Any]]:
    """Load each case's checkpoint into a fresh model, do further steps; return the whole states."""
    states = []
    for number, case in enumerate(cases):
        chunk, optimizer = resume(case, Path(folder, str(number)), read)
        steps(case, chunk, optimizer, 2, 2 + further)
        states.append(full_state(case, chunk, optimizer))
        forget_megatron()
    return states if distributed.get_rank() == 0 else []


def differences(saved: dict[str, Any], loaded: dict[str, Any]) -> list[str]:
    """Return the names of what is not bit-equal, or only in one of them."""
    different = sorted(saved.keys() ^ loaded.keys())
    for key in saved.keys() & loaded.keys():
        one, other = saved[key], loaded[key]
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        if not same:
            different.append(key)
    return different
