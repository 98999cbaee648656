"""Runs the real optimizer step of one rank of a large job on this machine, and times it.

The rank's shards, state and buffers are real. Collectives send nothing: what other ranks would send
is random, and the time to make it up counts as waiting.
"""

import gc
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from benchmarks.gpu_check.stock import REFUSALS, Share, settings_of, share_of, stock_muon
from megatron_eopt.base import gpu
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.tools.dry_run import Report, dry_world, report_of
from megatron_eopt.tools.dry_run.counting import current_phase
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.model import ParallelLayout, build_stage
from megatron_eopt.tools.plan.planning import adams
from megatron_eopt.wrappers.config import EmergingOptimizerConfig
from megatron_eopt.wrappers.factory import get_megatron_optimizer

_SIZES = (
    "hidden_size",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "kv_channels",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
)
"""Fields that are sides of weights."""

_COPIES = {"exchange", "copies to the model"}
"""Phases whose kernels only move data."""

_MOST_PER_WEIGHT = 12
"""Bytes of Adam's state and temporaries for a weight."""

_STEPS = 3
"""Steps that are timed as a whole."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a rank's step took on this machine."""

    step: float  # seconds of a step, the median of several
    parts: Mapping[str, float]  # seconds by part, of a step whose parts waited for each other
    peak: int  # bytes at the peak of a step: the GPU's allocator's, or of tensors on a CPU
    elements: int  # number of weights that the rank updates


@dataclass(frozen=True, kw_only=True)
class Replayed(Run):
    """What a rank's step did on this machine, and what the dry run said."""

    rank: int
    device: str
    report: Report  # counted while the real step ran
    expected: Report  # of the dry run

    @property
    def agrees(self) -> bool:
        """Whether kernels, bytes, FLOPs, waits and collectives are those of the dry run."""
        return figures(self.report) == figures(self.expected)


@dataclass(frozen=True, kw_only=True)
class Other(Run):
    """What another optimizer's step took on the same rank."""

    share: Share | None  # of megatron-core's Muon: which matrices the rank has
    notes: tuple[str, ...]  # how it differs from ours


def figures(report: Report) -> tuple[Any, ...]:
    """Return all that a dry run must foresee exactly."""
    return report.elements, report.phases, report.collectives, report.host_reads


def scaled(architecture: Architecture, scale: Fraction) -> Architecture:
    """Return a model whose weights have ``scale`` as many elements, by shorter sides.

    Raises:
        ConfigurationError: If a side cannot be divided evenly.
    """
    divisor = math.isqrt(scale.denominator)
    if scale.numerator != 1 or divisor**2 != scale.denominator:
        rule = "must be 1 over a square number, since both sides of a weight become shorter"
        raise ConfigurationError("scale", str(scale), rule, "Use 1/4, 1/16 or 1/64")
    sizes = {name: architecture.fields[name] for name in _SIZES if architecture.fields.get(name)}
    if "kv_channels" not in sizes and "kv_lora_rank" not in sizes:
        sizes["kv_channels"] = (
            architecture.fields["hidden_size"] // architecture.fields["num_attention_heads"]
        )
    odd = {name: size for name, size in sizes.items() if size % divisor}
    if odd:
        name, size = next(iter(odd.items()))
        rule = f"must divide all sides of weights by {divisor}, but {name} is {size}"
        raise ConfigurationError("scale", str(scale), rule, "Choose a larger scale")
    fields = {**architecture.fields, **{name: size // divisor for name, size in sizes.items()}}
    # a multiple of 128, so that tensor parallelism divides it evenly
    vocab = -(-architecture.vocab_size // divisor // 128) * 128
    return replace(architecture, fields=fields, vocab_size=vocab)


def replay(
    architecture: Architecture,
    layout: ParallelLayout,
    config: EmergingOptimizerConfig,
    rank: int,
    tell: Callable[[str], None] = lambda _: None,
) -> Replayed:
    """Run a rank's optimizer step on this machine's GPU, or on its CPU if there is none.

    Raises:
        ConfigurationError: If the rank does not fit into memory.
    """

    def build() -> tuple[Any, Any]:
        model = build_stage(architecture, layout)
        return model, get_megatron_optimizer(config, [model])

    tell(f"counting the step of rank {rank}")
    with dry_world(rank, layout.world_size, like_cpus=not gpu.is_there()):
        expected = report_of(build()[1], lambda: None)
    # on a CPU, "host memory" is the same memory
    host = 0 if gpu.is_there() else expected.memory.host
    _check_fit(rank, expected.memory.total + host, tell)
    tell(f"running the step of rank {rank}")
    report, run = _run(rank, layout, build, lambda _, optimizer: report_of(optimizer, lambda: None))
    return Replayed(
        rank=rank,
        device=torch.cuda.get_device_name() if gpu.is_there() else "CPU",
        report=report,
        expected=expected,
        **vars(run),
    )


def replay_others(
    architecture: Architecture,
    layout: ParallelLayout,
    config: EmergingOptimizerConfig,
    rank: int,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Other | str]:
    """Run the step of the same rank with Adam, and with megatron-core's own Muon.

    Returns:
        What each did, or one sentence that says why it cannot be run.
    """
    found: dict[str, Other | str] = {}

    def add(name: str, build: Callable[[], tuple[Any, Any]], notes: Sequence[str]) -> None:
        def look(model: Any, optimizer: Any) -> Share | None:
            optimizer.step()
            return share_of(optimizer, model, layout) if name == "stock" else None

        tell(f"building rank {rank} with {name}")
        with dry_world(rank, layout.world_size, like_cpus=not gpu.is_there()), LiveBytes() as live:
            # steps of megatron-core need values, so state and temporaries are estimated
            model, optimizer = build()
            largest = max(param.numel() for param in model.parameters())
            needed = live.grown + _MOST_PER_WEIGHT * _updated(optimizer) + 16 * largest
            del model, optimizer
        _check_fit(rank, needed, tell)
        tell(f"running the step of rank {rank} with {name}")
        share, run = _run(rank, layout, build, look)
        found[name] = Other(share=share, notes=tuple(notes), **vars(run))

    def adam() -> tuple[Any, Any]:
        model = build_stage(architecture, layout)
        return model, get_megatron_optimizer(adams(config), [model])

    try:
        add("adam", adam, ())
    except ConfigurationError as error:
        found["adam"] = str(error)
    try:
        theirs, notes = settings_of(config)
        add("stock", lambda: stock_muon(architecture, layout, theirs), notes)
    except (ConfigurationError, *REFUSALS) as error:
        found["stock"] = " ".join(str(error).split())
    return found


def _run[T](
    rank: int,
    layout: ParallelLayout,
    build: Callable[[], tuple[Any, Any]],
    look: Callable[[Any, Any], T],
) -> tuple[T, Run]:
    """Build a model and its optimizer, let ``look`` run the first steps, and time others."""
    on_gpu = gpu.is_there()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    with dry_world(rank, layout.world_size, cuda=nullcontext() if on_gpu else None, real=True):
        with LiveBytes() as held:
            model, optimizer = build()
            with torch.no_grad():
                for param in model.parameters():
                    param.normal_(std=0.02)
                    # so small that clipping, which would be counted, has nothing to do
                    param.main_grad.normal_(std=1e-9)
            seen = look(model, optimizer)
            kept = held.grown
        seconds = [_timed(optimizer) for _ in range(_STEPS)]
        # the clock is inside, so that it does not see what counting takes
        with _Clock() as clock, LiveBytes() as live:
            optimizer.step()
        run = Run(
            step=statistics.median(seconds),
            parts=dict(clock.seconds),
            peak=torch.cuda.max_memory_allocated() - before if on_gpu else kept + live.peak,
            elements=_updated(optimizer),
        )
    return seen, run


def _updated(optimizer: Any) -> int:
    """Return the number of weights that an optimizer updates."""
    return sum(param.numel() for group in optimizer.param_groups for param in group["params"])


def _check_fit(rank: int, needed: int, tell: Callable[[str], None]) -> None:
    free = torch.cuda.mem_get_info()[0] if gpu.is_there() else _free_memory()
    tell(f"rank {rank} needs {needed / 2**30:.2f} GiB of {free / 2**30:.2f} GiB")
    if needed > free:
        rule = f"needs {needed / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free"
        raise ConfigurationError("rank", rank, rule, "Use the scale 1/64, or a larger layout")


def _timed(optimizer: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _free_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _Clock(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Times each operator; the device finishes it before the next begins."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        torch.cuda.synchronize()
        self.seconds[_part(func)] += time.perf_counter() - start
        return result


def _part(func: Any) -> str:
    if func.namespace == "c10d":
        return "waiting"
    # as in ``Counts``, which the plan's numbers come from
    if func.overloadpacket in flop_registry:
        return "products"
    return "copies" if current_phase().name in _COPIES else "passes"
