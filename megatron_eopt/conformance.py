"""Check that an optimizer, or a way to store its weights, trains the same on two ranks as on one.

:func:`check` is for tests of packages that add one. It needs no GPU. A small model with fused
weights of unequal parts takes steps with given gradients, some of which are clipped. Waves are so
small that each holds one matrix, so that ranks finish fused weights in different waves. Memory that
an update rule must not use any more is overwritten: places in a wave's stacks after their updates
were stored, and off-loaded tensors from their write-back to their next use.
"""

import contextlib
import functools
import logging
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
        TorchFullyShardedDataParallelConfig,
    )
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import (
        preprocess_state_dict_for_uneven_dtensor,
    )
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig

    from megatron_eopt import checkpoints, cpu
    from megatron_eopt.base.address import address_of
    from megatron_eopt.base.log import inform
    from megatron_eopt.base.place import place_of
    from megatron_eopt.config.config import EmergingOptimizerConfig
    from megatron_eopt.config.registry import EmergingOptimizerEntry, registered, state_layout_of
    from megatron_eopt.cpu.patches import Patch, patched
    from megatron_eopt.layouts import Redistribution
    from megatron_eopt.matrices import Field, Section, Split, gated
    from megatron_eopt.optimizers import modes, update_rule, whole_matrix_rule
    from megatron_eopt.optimizers.host_memory import HostMemory
    from megatron_eopt.optimizers.muon_rule import MuonRule
    from megatron_eopt.optimizers.storage import rules_of
    from megatron_eopt.routing.plain_names import plain_names
    from megatron_eopt.storage import local_tensors
    from megatron_eopt.storage.local_tensors import is_uneven, local_of, shard_like
    from megatron_eopt.wrappers.builders import BUILDERS, OptimizerBuildContext
    from megatron_eopt.wrappers.chain import OptimizerChain
    from megatron_eopt.wrappers.factory import get_megatron_optimizer
    from megatron_eopt.wrappers.megatron_fsdp import fsdp_modules
    from megatron_eopt.wrappers.parts import build_sharded

logger = logging.getLogger(__name__)

__all__ = ["ConformanceError", "check", "in_rows", "in_zero1", "part_of"]

type WrapT = Callable[[nn.Module], Any]
"""Takes a model whose parameters are whole, the same on all ranks; returns the chunk to train, of
whose parameters each rank has what it stores. It is called on every rank."""

type _Entry = EmergingOptimizerEntry | None

type RunT = Callable[..., list[Any]]
"""Called as ``(ranks, function, *args, timeout=seconds)``; calls ``function(*args)`` on each of so
many ranks, which gloo connects, and returns their results. The CPU back end is enabled there."""

_HALFWAY, _STEPS = 2, 4
_SMALL, _LARGE = 0.001, 64.0  # MiB of a wave


class ConformanceError(AssertionError):
    """Ranks train otherwise than one process; the message says where."""


@dataclass(frozen=True)
class _Case:
    """How the model is trained."""

    optimizer: str
    fields: Mapping[str, Any]  # of the configuration
    wrap: WrapT
    config_class: type[EmergingOptimizerConfig] = EmergingOptimizerConfig
    wave_mb: float = _SMALL
    off_loads: bool = False  # then weights are bfloat16, so that main weights can be off-loaded
    in_teams: bool = False  # whether both ranks share each matrix, by slabs

    @property
    def name(self) -> str:
        flags = {", off-loaded": self.off_loads, ", in teams": self.in_teams}
        return self.wrap.__name__ + "".join(how for how, is_on in flags.items() if is_on)

    @property
    def is_saved(self) -> bool:
        """Whether Megatron's trainers have a checkpoint format for the storage."""
        return self.wrap is not in_megatron_fsdp_v2

    @property
    def reference(self) -> "_Case":
        """What one rank trains in one wave, to compare with."""
        wrap = in_zero1 if self.wrap in _OF_ALL else self.wrap
        return replace(self, wrap=wrap, wave_mb=_LARGE, off_loads=False, in_teams=False)


@dataclass
class _Trained:
    """What one process has trained."""

    weights: list[dict[str, Tensor]]  # whole weights before the first step, halfway and at the end
    norms: list[float]
    zeros: list[float]


type _References = Mapping[str, _Trained]
"""By the names of :attr:`_Case.reference`."""


def check(
    optimizer: str | EmergingOptimizerEntry,
    config: Mapping[str, Any] | None = None,
    *,
    storage: WrapT | None = None,
    config_class: type[EmergingOptimizerConfig] = EmergingOptimizerConfig,
    tolerance: float = 1e-4,
    run: RunT | None = None,
    timeout: float = 300.0,
) -> None:
    """Check that two ranks train as one does, and log what was checked; call it from a test.

    Weights, gradient norms and counts of zeros are compared after steps with and without clipping,
    and after loading a checkpoint of one rank on two and of two on one.

    Args:
        optimizer: Your optimizer's entry, of which all parts are at the top of modules, or the name
            of one of ours.
        config: Fields of the configuration.
        storage: A module-level function that stores a model in a form of your own; its module
            registers the builder. None checks uneven and empty shards (``in_rows``), ZeRO-1, also
            with off-loading and where ranks share each matrix, FSDP2, copies, and Megatron-FSDP;
            its second version with megatron-core 0.20 or later, and without loading.
        config_class: ``EmergingOptimizerConfig``, or a subclass with fields of your own.
        tolerance: Largest difference of a weight, relative to how far training has moved it.
        run: Runs a function on ranks; None starts new processes.
        timeout: Seconds that each of three runs may take.

    Raises:
        ConformanceError: If ranks train otherwise, or do not finish.
    """
    run = run or _run
    fields, name = dict(config or {}), str(optimizer)
    entry: _Entry = None
    if isinstance(optimizer, EmergingOptimizerEntry):
        entry, name, optimizer = optimizer, optimizer.optimizer_cls.__name__, "under_test"
    with registered("under_test", entry):
        # copies of optimizers that keep state of whole matrices do not split fused weights
        left = {in_copies} if state_layout_of(optimizer) == "matrix_state" else set()
    if not _HAS_VERSION_2:
        left.add(in_megatron_fsdp_v2)
    wraps = [wrap for wrap in _OF_ALL if wrap not in left] if storage is None else [storage]
    cases = [_Case(optimizer, fields, wrap, config_class) for wrap in wraps]
    if storage is None:
        # uneven rows are not off-loaded
        cases.append(replace(cases[0], off_loads=True))
        cases.append(replace(cases[0], in_teams=True))
    references: _References = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks, trains, resumes in ((1, True, False), (2, True, True), (1, False, True)):
            job = entry, cases, folder, tolerance, references, trains, resumes
            try:
                replies = run(ranks, _checked, *job, timeout=timeout)
            except Exception as error:
                raise ConformanceError(f"the ranks failed: {error}") from error
            if problems := [line for _, found in replies for line in found]:
                raise ConformanceError("\n".join(dict.fromkeys(problems)))
            references = replies[0][0]
    lines = [f"{case.name}{'' if case.is_saved else ', not resumed'}" for case in cases]
    if storage is None and not _HAS_VERSION_2:
        lines.append(f"not {in_megatron_fsdp_v2.__name__}, which needs megatron-core 0.20")
    cases_of = "\n  ".join(lines)
    inform(logger, f"{name} trains on two ranks as on one, also when resumed:\n  {cases_of}")


# What a rank does


def _checked(
    entry: _Entry,
    cases: Sequence[_Case],
    folder: str,
    tolerance: float,
    references: _References,
    trains: bool,
    resumes: bool,
) -> tuple[_References, list[str]]:
    """Compare runs with the references, which the first call makes; return both.

    With ``trains``, each case is trained, and saved halfway. With ``resumes``, it continues from
    what the other number of ranks has saved.
    """
    references, problems = dict(references), []
    ranks = distributed.get_world_size()
    with _scene(entry):
        for case in cases:
            if (whole := case.reference).name not in references:
                references[whole.name] = _reference(whole)
            expected = references[whole.name]
            if trains:
                problems += _trained(case, expected, tolerance, f"{folder}/{ranks} {case.name}")
            if resumes and case.is_saved:
                problems += _resumed(case, expected, tolerance, f"{folder}/{3 - ranks} {case.name}")
    return references, problems


def _reference(whole: _Case) -> _Trained:
    chunk, chain = _built(whole)
    trained = _Trained([_whole_weights(chunk, chain)], [], [])
    for first, stop in ((0, _HALFWAY), (_HALFWAY, _STEPS)):
        trained.norms += _train(chunk, chain, first, stop, trained.zeros)
        trained.weights.append(_whole_weights(chunk, chain))
    return trained


def _trained(case: _Case, expected: _Trained, tolerance: float, folder: str) -> list[str]:
    chunk, chain = _built(case)
    zeros: list[float] = []
    norms = _train(chunk, chain, 0, _HALFWAY, zeros)
    if case.is_saved:
        _save(_state(chunk, chain, is_loading=False), folder)
    norms += _train(chunk, chain, _HALFWAY, _STEPS, zeros)
    problems = _differences(chunk, chain, expected, tolerance)
    for what, mine, others in (("norm", norms, expected.norms), ("zeros", zeros, expected.zeros)):
        if any(abs(a - b) > tolerance * b for a, b in zip(mine, others, strict=True)):
            problems.append(f"gradient {what} of the steps is {mine}, not {others}")
    return [f"{case.name} on {distributed.get_world_size()}: {line}" for line in problems]


def _resumed(case: _Case, expected: _Trained, tolerance: float, folder: str) -> list[str]:
    chunk, chain = _built(case)
    with torch.no_grad():
        for _, param in _named(chunk):
            # so that only what is loaded can be right
            local_of(param).zero_()
    loaded = _loaded(_state(chunk, chain, is_loading=True), folder)
    with torch.no_grad():
        for name, param in _named(chunk):
            local_of(param).copy_(local_of(loaded["model"][name]))
    chain.load_state_dict(loaded["optimizer"])
    _train(chunk, chain, _HALFWAY, _STEPS, [])
    problems = _differences(chunk, chain, expected, tolerance)
    ranks = distributed.get_world_size()
    return [f"{case.name} on {ranks}, continued from {3 - ranks}: {line}" for line in problems]


def _built(case: _Case) -> tuple[Any, OptimizerChain]:
    """Return the model, stored as the case says, and its optimizer."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model = _Model()
    bf16 = case.off_loads or bool(case.fields.get("bf16"))
    chunk = case.wrap(model.bfloat16() if bf16 else model)
    fields: dict[str, Any] = {
        "optimizer": case.optimizer,
        "lr": 0.02,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "use_distributed_optimizer": case.wrap not in (in_copies, in_fsdp2, in_megatron_fsdp_v2),
        "log_num_zeros_in_grad": True,
        "muon_fp32_matmul_prec": "highest",
        "matrix_buffer_mb": case.wave_mb,
        "bf16": bf16,
        "optimizer_cpu_offload": case.off_loads,
        "optimizer_offload_fraction": float(case.off_loads),
    }
    config = case.config_class(**{**fields, **case.fields})
    with patched([Patch(modes, "assign_teams", _everyone)] if case.in_teams else []):
        chain = get_megatron_optimizer(config, [chunk])
    if not isinstance(chain, OptimizerChain):
        raise TypeError(f"check() needs an optimizer of this package, not {type(chain).__name__}")
    for group in chain.param_groups:
        # as a scheduler does
        group["lr"] = group.get("max_lr", fields["lr"])
        group["weight_decay"] = fields["weight_decay"] * group["wd_mult"]
    for host, rule in [(rule.host, rule) for rule in rules_of(chain.chained_optimizers)]:
        if isinstance(host, _PoisonedHost):
            rule.step = functools.partial(host.during, rule.step)  # type: ignore[method-assign]
    return chunk, chain


def _train(
    chunk: Any, chain: OptimizerChain, first: int, stop: int, zeros: list[float]
) -> list[float]:
    """Take steps; return gradient norms, and append counts of zeros."""
    norms = []
    for step in range(first, stop):
        chain.zero_grad()
        for name, param in _named(chunk):
            # the norms are above and below that to which gradients are clipped
            whole = _random(f"{name} {step}", _SHAPES[name]) * (0.01 if step % 2 else 1.0)
            whole.view(-1)[::5] = 0
            part = part_of(param, whole)
            if getattr(param, "main_grad", None) is not None:
                param.main_grad.copy_(part)
            else:
                param.grad = part.to(param.dtype)
        _, norm, count = chain.step()
        norms.append(float(norm))
        zeros.append(float(count or 0))
    return norms


def part_of(param: Tensor, whole: Tensor) -> Tensor:
    """Return what this rank stores of a tensor that is cut like ``param``."""
    if isinstance(param, DTensor):
        return shard_like(param, local_tensors.part_of(param, whole).contiguous())
    place = place_of(param)
    if place is not None:
        for dim, (first, size) in enumerate(zip(place.offset, param.shape, strict=True)):
            whole = whole.narrow(dim, first, size)
    return whole.contiguous()


def _mains(chunk: Any, chain: OptimizerChain) -> Iterator[tuple[str, Any, Tensor]]:
    """Yield the name of each parameter that this rank stores, where, and its main weights."""
    names = {param: name for name, param in _named(chunk)}
    for storage in chain.chained_optimizers:
        for item in storage.main_shards():
            yield names[item.param], item, local_of(item.main).detach().reshape(-1)


def _whole_weights(chunk: Any, chain: OptimizerChain) -> dict[str, Tensor]:
    return {n: main.clone().view(_SHAPES[n]) for n, _, main in _mains(chunk, chain)}


def _differences(
    chunk: Any, chain: OptimizerChain, expected: _Trained, tolerance: float
) -> list[str]:
    """Return a line for each weight that is not as expected."""
    start, *_, end = expected.weights
    problems = []
    for name, item, main in _mains(chunk, chain):
        want = local_of(part_of(item.param, end[name])).reshape(-1)[item.start : item.stop]
        far, moved = (main - want).norm(), (end[name] - start[name]).norm()
        if not far <= tolerance * moved:
            problems.append(f"{name} is {float(far / moved):.2g} of its way off")
        param = local_of(item.param).detach().reshape(-1)[item.start : item.stop]
        if not torch.equal(param, main.to(param.dtype)):
            problems.append(f"{name} of the model is not its main weight")
    return problems


def _state(chunk: Any, chain: OptimizerChain, *, is_loading: bool) -> dict[str, Any]:
    """Return what is saved, or loaded."""
    params = dict(_named(chunk))
    if any(map(is_uneven, params.values())):
        how = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        state = chain.sharded_state_dict(params, is_loading=is_loading, metadata=how)
        prepared: dict[str, Any] = {"model": params, "optimizer": state}
        preprocess_state_dict_for_uneven_dtensor(prepared)
        return prepared
    model, its = ({name: _saved(name, p) for name, p in params.items()} for _ in range(2))
    how = {"distrib_optim_sharding_type": "fully_reshardable"}
    state = chain.sharded_state_dict(its, is_loading=is_loading, metadata=how)
    return {"model": model, "optimizer": state}


def _save(state: dict[str, Any], folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    if _is_of_tensors(state):
        save(state, checkpoint_id=folder)
    else:
        dist_checkpointing.save(state, folder)


def _loaded(state: dict[str, Any], folder: str) -> Any:
    if not _is_of_tensors(state):
        return checkpoints.load(state, folder)
    load(state, checkpoint_id=folder)
    return state


def _is_of_tensors(state: Mapping[str, Any]) -> bool:
    """Return whether torch saves a state and loads it in place, and not megatron-core."""
    return all(isinstance(value, Tensor) for value in state["model"].values())


def _saved(name: str, param: Tensor) -> ShardedTensor:
    place, local, shape = place_of(param), local_of(param), _SHAPES[name]
    offset = (0,) * len(shape) if place is None else place.offset
    if isinstance(param, DTensor):
        local = param._local_tensor
        _, offset = compute_local_shape_and_global_offset(
            shape, param.device_mesh, param.placements
        )
    # of copies, one is saved
    is_copy = getattr(param, "shared", False) if place is not None else local.shape == shape
    replica = (0, 0, distributed.get_rank() if is_copy else 0)
    return ShardedTensor(
        name, local, local.dtype, tuple(local.shape), shape, tuple(offset), None, replica
    )


def _named(chunk: nn.Module) -> Iterator[tuple[str, Any]]:
    for module in fsdp_modules([chunk]):
        # a step leaves the whole parameters, as a forward pass needs them
        module._replace_param_with_distributed_if_needed()
    plain = plain_names(chunk)
    for name, param in chunk.named_parameters():
        yield plain[name], param


# Ways to store the model


def in_zero1(model: nn.Module) -> Any:
    """Store a model in fragments, as ``use_distributed_optimizer=True`` does."""
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True
    )
    return DistributedDataParallel(model.config, ddp_config, model)


def in_copies(model: nn.Module) -> Any:
    """Store a copy on each rank, as without the distributed optimizer."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, ddp_config, model)


def in_fsdp2(model: nn.Module) -> Any:
    """Store rows of each parameter as DTensors, as megatron-core's wrapper of torch's FSDP2."""
    config = TorchFullyShardedDataParallelConfig()
    return TorchFullyShardedDataParallel(model.config, config, model)


def in_megatron_fsdp(model: nn.Module) -> Any:
    """Store ranges of flattened parameters, as the first version of Megatron-FSDP."""
    return _in_megatron_fsdp(model)


def in_megatron_fsdp_v2(model: nn.Module) -> Any:
    """Store rows of each module's parameters, as the second version of Megatron-FSDP."""
    return _in_megatron_fsdp(model, megatron_fsdp_version=2)


def _in_megatron_fsdp(model: Any, **version: int) -> Any:
    model.config.gradient_accumulation_fusion = False
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy="optim_grads_params",
        gradient_reduce_div_fusion=False,
        **version,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return FullyShardedDataParallel(
        model.config, ddp_config, model, fsdp_unit_modules=[nn.Linear], pg_collection=groups
    )


def in_rows(model: nn.Module) -> Any:
    """Store any number of rows of each parameter on each rank; norms are copies."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for number, (name, param) in enumerate(model.named_parameters()):
        rows, *others = param.shape
        shares = (0, rows) if ranks == 1 else (0, rows * (1, 4, 0, 9, 6)[number % 5] // 9, rows)
        first, stop = (0, rows) if name.startswith("norm") else shares[rank : rank + 2]
        param.eopt_place = ((first, *(0 for _ in others)), tuple(param.shape))  # type: ignore[attr-defined]
        param.data = param.data[first:stop].clone()
    model.in_rows = True  # type: ignore[assignment]
    return model


def _build_in_rows(context: OptimizerBuildContext) -> OptimizerChain | None:
    if not hasattr(context.model_chunks[0], "in_rows"):
        return None
    assert distributed.group.WORLD is not None
    return build_sharded(context, distributed.group.WORLD)


_OF_ALL = (in_zero1, in_rows, in_fsdp2, in_megatron_fsdp, in_megatron_fsdp_v2, in_copies)
"""What :func:`check` checks without a storage of the caller's."""

_HAS_VERSION_2 = hasattr(DistributedDataParallelConfig, "megatron_fsdp_version")


class _Model(nn.Module):
    """Layers with plain and fused weights, and what Adam trains."""

    def __init__(self) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=16, num_attention_heads=1, cuda_graph_modules=[]
        )
        self.qkv = nn.Linear(16, 96)
        self.gate_up = nn.Linear(16, 24, bias=False)
        self.tall, self.wide = nn.Linear(16, 40, bias=False), nn.Linear(40, 16)
        self.square = nn.Linear(16, 16, bias=False)
        self.norm = nn.LayerNorm(16)
        self.table = nn.Embedding(11, 16)
        # in small waves, the rank that stores the first rows has them back before the others
        parts = (Section((Field("q", 10),)), Section((Field("kv", 86),)))
        self.qkv.weight.eopt_split = Split("qkv", (96, 16), parts)  # type: ignore[attr-defined]
        self.gate_up.weight.eopt_split = gated((24, 16))  # type: ignore[attr-defined]
        for name, param in self.named_parameters():
            # bfloat16 has the same numbers
            param.data.copy_(_random(name, tuple(param.shape)).bfloat16())


def _random(name: str, shape: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator)


_SHAPES = {name: tuple(param.shape) for name, param in _Model().named_parameters()}


def _everyone(
    shapes: Sequence[tuple[int, int]], world_size: int, largest: int, *_: Any
) -> list[tuple[int, ...]] | None:
    """Let all ranks share each matrix, which :func:`modes.assign_teams` does for large ones."""
    return [tuple(range(world_size))] * len(shapes) if largest >= world_size > 1 else None


# Memory that must not be used any more


class _PoisonedHost(HostMemory):
    """Lets an update rule see no values in host memory during a step, where it is to fetch them."""

    def __init__(self, *args: Any) -> None:
        self._in_step = False
        self._true: dict[Tensor, list[tuple[Tensor, Tensor]]] = {}
        super().__init__(*args)

    def announce(self, params: Iterable[Tensor], state: Any) -> None:
        """Start to copy what will be fetched."""
        params = list(params)
        self._restore(params)
        super().announce(params, state)

    def write_back(self, params: Iterable[Tensor], state: Any) -> None:
        """Move weights and state back to the host."""
        params = list(self.params.intersection(params))
        used = [value for param in params for _, value in self._tensors(param, state)]
        super().write_back(params, state)
        _poison(used)
        for param in params:
            homes = [home for _, home in self._tensors(param, state)]
            self._true[param] = [(home, home.clone()) for home in homes]
            _poison(homes)

    def settle(self) -> None:
        """Wait until the host can read what was written back."""
        super().settle()
        if not self._in_step:
            self._restore(list(self._true))

    def during(self, step: Callable[..., None], *args: Any) -> None:
        """Take a step of the update rule."""
        self._in_step = True
        try:
            step(*args)
        finally:
            self._in_step = False
            self.settle()

    def _restore(self, params: Iterable[Tensor]) -> None:
        for param in params:
            for home, value in self._true.pop(param, ()):
                home.copy_(value)


def _poison(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else 77)


class _NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where a collective may hang, or add up different parameters."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.name.startswith("c10d::"):
            text = (
                "%s while updates are stored, which ranks do in another order; see sums_per_matrix"
            )
            raise ConformanceError(text % func._schema.name)
        return func(*args, **(kwargs or {}))


_plain_run = Redistribution.run


def _poisoned_run(self: Redistribution, load: Any, compute: Any, store: Any, *rest: Any) -> None:
    def store_and_poison(results: Mapping[str, Tensor]) -> None:
        with _NoCollectives():  # type: ignore[no-untyped-call]
            store(results)
        for name, result in results.items():
            place = self.place(name)
            if place is not None and address_of(place) == address_of(result):
                _poison([result])

    _plain_run(self, load, compute, store_and_poison, *rest)
    _poison(self.buffers.values())


_plain_apply_with_totals = MuonRule._apply_with_totals


def _watched_apply_with_totals(self: MuonRule, *args: Any) -> None:
    with _NoCollectives():  # type: ignore[no-untyped-call]
        _plain_apply_with_totals(self, *args)


@contextlib.contextmanager
def _scene(entry: _Entry) -> Iterator[None]:
    """Register what is tested, and poison memory."""
    BUILDERS.append(_build_in_rows)
    patches = [
        Patch(update_rule, "HostMemory", _PoisonedHost),
        Patch(whole_matrix_rule, "HostMemory", _PoisonedHost),
        Patch(Redistribution, "run", _poisoned_run),
        Patch(MuonRule, "_apply_with_totals", _watched_apply_with_totals),
    ]
    try:
        with patched(patches), registered("under_test", entry):
            yield
    finally:
        BUILDERS.remove(_build_in_rows)


# Processes


def _run(ranks: int, function: Callable[..., Any], *args: Any, timeout: float) -> list[Any]:
    """Call a function on ranks in new processes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # not torch's pickler, which shares memory that ends with a process
    job = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=_serve, args=(rank, ranks, f"{folder}/store", ours, job))
            for rank, (_, ours) in enumerate(pipes)
        ]
        # what new processes import warns before `_serve` runs
        with mock.patch.dict(os.environ, PYTHONWARNINGS="ignore"):
            for process, (_, ours) in zip(processes, pipes, strict=True):
                process.start()
                ours.close()
        try:
            replies = [_reply(theirs, rank, timeout) for rank, (theirs, _) in enumerate(pipes)]
        finally:
            for process in processes:
                # with what it has started to write checkpoints
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(cast(int, process.pid), signal.SIGKILL)
                process.kill()
                process.join()
    if errors := [error for error, _ in replies if error]:
        raise RuntimeError(errors[0])
    return [result for _, result in replies]


def _reply(pipe: Any, rank: int, timeout: float) -> tuple[str | None, Any]:
    if not pipe.poll(timeout):
        return f"rank {rank} is not done after {timeout:g} s", None
    try:
        return pickle.loads(pipe.recv_bytes())  # type: ignore[no-any-return]
    except EOFError:
        return f"rank {rank} has ended", None


def _serve(rank: int, ranks: int, store: str, pipe: Any, job: bytes) -> None:
    # a process group of its own, which the parent can end with all its children
    os.setpgid(0, 0)
    # of upstream, in each process
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cpu.enable()
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=30),
    )
    reply: tuple[str | None, Any]
    try:
        function, args = pickle.loads(job)
        reply = None, function(*args)
    except Exception:
        # as text, because an error may hold what cannot be pickled
        reply = traceback.format_exc(), None
    pipe.send_bytes(pickle.dumps(reply))
    # the parent ends this process once all ranks have replied
    signal.pause()
