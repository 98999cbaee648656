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
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from megatron.core import parallel_state

    from megatron_eopt.base.log import inform
    from megatron_eopt.config.registry import EmergingOptimizerEntry, registered, state_layout_of
    from megatron_eopt.cpu.patches import Patch, patched
    from megatron_eopt.megatron_core.stored_weights import rules_of
    from megatron_eopt.optimizers import modes
    from megatron_eopt.storage.local_tensors import local_of
    from megatron_eopt.testing.poison import PATCHES, PoisonedHost
    from megatron_eopt.testing.pool import run_ranks
    from megatron_eopt.testing.saved_models import load_state, save_state, state_of
    from megatron_eopt.testing.stored_models import (
        HAS_VERSION_2,
        SHAPES,
        STORAGES,
        SmallModel,
        build_in_rows,
        in_copies,
        in_fsdp2,
        in_megatron_fsdp_v2,
        in_zero1,
        named_params,
        part_of,
        random_tensor,
    )
    from megatron_eopt.wrappers.builders import BUILDERS
    from megatron_eopt.wrappers.chain import OptimizerChain
    from megatron_eopt.wrappers.config import EmergingOptimizerConfig
    from megatron_eopt.wrappers.factory import get_megatron_optimizer
    from megatron_eopt.wrappers.gradients import fuses_grad_scale

logger = logging.getLogger(__name__)

type WrapT = Callable[[nn.Module], Any]
"""Takes a model whose parameters are whole, the same on all ranks; returns the chunk to train, of
whose parameters each rank has what it stores. It is called on every rank."""

type _Entry = EmergingOptimizerEntry | None

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
        wrap = in_zero1 if self.wrap in STORAGES else self.wrap
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
    timeout: float = 300.0,
) -> None:
    """Check that two ranks train as one does, and log what was checked; call it from a test.

    Weights, gradient norms and counts of zeros are compared after steps with and without clipping,
    and after loading a checkpoint of one rank on two and of two on one. A step with a gradient norm
    that is not finite must leave weights and state as they are.

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
        timeout: Seconds that each of three runs may take.

    Raises:
        ConformanceError: If ranks train otherwise, or do not finish.
    """
    fields, name = dict(config or {}), str(optimizer)
    entry: _Entry = None
    if isinstance(optimizer, EmergingOptimizerEntry):
        entry, name, optimizer = optimizer, optimizer.optimizer_cls.__name__, "under_test"
    with registered("under_test", entry):
        # copies of optimizers that keep state of whole matrices do not split fused weights
        left = {in_copies} if state_layout_of(optimizer) == "matrix_state" else set()
    if not HAS_VERSION_2:
        left.add(in_megatron_fsdp_v2)
    wraps = [wrap for wrap in STORAGES if wrap not in left] if storage is None else [storage]
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
                replies = run_ranks(ranks, _checked, *job, timeout=timeout)
            except Exception as error:
                raise ConformanceError(f"the ranks failed: {error}") from error
            if problems := [line for _, found in replies for line in found]:
                raise ConformanceError(_summary(name, list(dict.fromkeys(problems))))
            references = replies[0][0]
    lines = [f"{case.name}{'' if case.is_saved else ', not resumed'}" for case in cases]
    if storage is None and not HAS_VERSION_2:
        lines.append(f"not {in_megatron_fsdp_v2.__name__}, which needs megatron-core 0.20")
    cases_of = "\n  ".join(lines)
    inform(logger, f"{name} trains on two ranks as on one, also when resumed:\n  {cases_of}")


_CAUSES = (
    (
        lambda line: "skipped, because" in line,
        "A skipped step changes something: heed self.grad_scale, or set fuses_grad_scale = False",
    ),
    (
        lambda line: ", continued from" in line,
        "A resumed run lacks something: keep it in item.state, and create it in init",
    ),
    (
        lambda line: ", off-loaded" in line,
        "Memory is used when it is no longer valid: see Note [Lifetimes] of update_rule.py",
    ),
    (
        lambda line: ", in teams" in line,
        "A slab is taken for a matrix: add up with reduce, or do not set takes_slabs",
    ),
    (
        lambda line: " on 1" in line,
        "The number of waves matters: _directions, _update and _apply run once for each wave, so "
        "count steps, and add up over parameters, in _run",
    ),
    (
        lambda line: " on 2" in line,
        "What a rank stores is taken for a whole matrix: use partial_sums and use_totals, or sums "
        "of stored_matrices",
    ),
)
"""What all lines of problems say, and what then usually is the cause; the first that fits counts.
"""


def _summary(name: str, problems: Sequence[str]) -> str:
    """Return the cause that all problems suggest, the first of them and, last, all."""
    fitting = (cause for fits, cause in _CAUSES if all(map(fits, problems)))
    cause = next(fitting, "Several causes: mend the first, and check again")
    first, *rest = problems
    return "\n".join([f"{name} trains otherwise. {cause}.", f"First: {first}", "Also:", *rest])


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
        save_state(state_of(chunk, chain, is_loading=False), folder)
    norms += _train(chunk, chain, _HALFWAY, _STEPS, zeros)
    problems = _differences(chunk, chain, expected, tolerance)
    for what, mine, others in (("norm", norms, expected.norms), ("zeros", zeros, expected.zeros)):
        if any(abs(a - b) > tolerance * b for a, b in zip(mine, others, strict=True)):
            problems.append(f"gradient {what} of the steps is {mine}, not {others}")
    problems += _changed_by_a_skipped_step(chunk, chain)
    return [f"{case.name} on {distributed.get_world_size()}: {line}" for line in problems]


def _resumed(case: _Case, expected: _Trained, tolerance: float, folder: str) -> list[str]:
    chunk, chain = _built(case)
    with torch.no_grad():
        for _, param in named_params(chunk):
            # so that only what is loaded can be right
            local_of(param).zero_()
    loaded = load_state(state_of(chunk, chain, is_loading=True), folder)
    with torch.no_grad():
        for name, param in named_params(chunk):
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
    model = SmallModel()
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
        if isinstance(host, PoisonedHost):
            rule.step = functools.partial(host.during, rule.step)  # type: ignore[method-assign]
    return chunk, chain


def _train(
    chunk: Any, chain: OptimizerChain, first: int, stop: int, zeros: list[float]
) -> list[float]:
    """Take steps; return gradient norms, and append counts of zeros."""
    norms = []
    for step in range(first, stop):
        _set_gradients(chunk, chain, step)
        _, norm, count = chain.step()
        norms.append(float(norm))
        zeros.append(float(count or 0))
    return norms


def _set_gradients(chunk: Any, chain: OptimizerChain, step: int) -> None:
    chain.zero_grad()
    for name, param in named_params(chunk):
        # the norms are above and below that to which gradients are clipped
        whole = random_tensor(f"{name} {step}", SHAPES[name]) * (0.01 if step % 2 else 1.0)
        whole.view(-1)[::5] = 0
        part = part_of(param, whole)
        if getattr(param, "main_grad", None) is not None:
            param.main_grad.copy_(part)
        else:
            param.grad = part.to(param.dtype)


def _changed_by_a_skipped_step(chunk: Any, chain: OptimizerChain) -> list[str]:
    """Return a line for each weight or state that a step changes whose factor on gradients is nan.

    On a GPU, where only the device knows that the norm is not finite, update rules skip the step.
    """
    storages = chain.chained_optimizers
    if not all(fuses_grad_scale(storage) for storage in storages):
        return []  # then the host knows, and no update rule steps
    _set_gradients(chunk, chain, _STEPS)
    chain.prepare_grads()
    before = _everything(chunk, chain)
    for rule in rules_of(storages):
        rule.scale_gradients(torch.tensor(torch.nan))
    for storage in storages:
        storage.step_with_ready_grads()
    return [
        f"the {key} is changed by a step that is skipped, because self.grad_scale is nan"
        for key, value in _everything(chunk, chain).items()
        if not torch.equal(value, before[key])
    ]


def _everything(chunk: Any, chain: OptimizerChain) -> dict[str, Tensor]:
    """Return copies of what this rank has of weights, main weights and state."""
    found, names = {}, {param: name for name, param in named_params(chunk)}
    for storage in chain.chained_optimizers:
        for item in storage.shards:
            values = {"weight": local_of(item.param).detach(), **storage.tensors_of(item)}
            for key, value in values.items():
                if isinstance(value, (Tensor, int, float)):
                    found[f"{key} of {names[item.param]}"] = torch.as_tensor(value).clone()
    return found


def _mains(chunk: Any, chain: OptimizerChain) -> Iterator[tuple[str, Any, Tensor]]:
    """Yield the name of each parameter that this rank stores, where, and its main weights."""
    names = {param: name for name, param in named_params(chunk)}
    for storage in chain.chained_optimizers:
        for item in storage.shards:
            yield names[item.param], item, local_of(item.main).detach().reshape(-1)


def _whole_weights(chunk: Any, chain: OptimizerChain) -> dict[str, Tensor]:
    return {n: main.clone().view(SHAPES[n]) for n, _, main in _mains(chunk, chain)}


def _differences(
    chunk: Any, chain: OptimizerChain, expected: _Trained, tolerance: float
) -> list[str]:
    """Return a line for each weight that is not as expected."""
    start, *_, end = expected.weights
    problems = []
    for name, item, main in _mains(chunk, chain):
        want = item.held_of(part_of(item.param, end[name]))
        far, moved = (main - want).norm(), (end[name] - start[name]).norm()
        if not far <= tolerance * moved:
            problems.append(f"{name} is {float(far / moved):.2g} of its way off")
        param = item.held_of(item.param)
        if not torch.equal(param, main.to(param.dtype)):
            problems.append(f"{name} of the model is not its main weight")
    return problems


@contextlib.contextmanager
def _scene(entry: _Entry) -> Iterator[None]:
    """Register what is tested, and poison memory."""
    BUILDERS.append(build_in_rows)
    try:
        with patched(PATCHES), registered("under_test", entry):
            yield
    finally:
        BUILDERS.remove(build_in_rows)


def _everyone(
    shapes: Sequence[tuple[int, int]], world_size: int, largest: int, *_: Any
) -> list[tuple[int, ...]] | None:
    """Let all ranks share each matrix, which :func:`modes.assign_teams` does for large ones."""
    return [tuple(range(world_size))] * len(shapes) if largest >= world_size > 1 else None
