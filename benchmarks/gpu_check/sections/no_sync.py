"""List where the host waits for the GPU in a step; only adaptive Muon may, for the gradient norm.

On GPUs, torch warns about every wait in one step, and raises an error at any wait in another. On a
CPU, a dry run provides the list.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from benchmarks.gpu_check.context import Context, Outcome
from benchmarks.gpu_check.models import build, give_gradients
from benchmarks.machine import ROOT
from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.wrappers.gradients import GradNorm
from tests.harness.models import tiny_gpt, wrap_ddp

MAY_WAIT = "gradients.read"
"""The function that reads the gradient norm, which adaptive Muon's statistics need."""

OPTIMIZERS = ("muon", "adaptive_muon", "adam")
MODEL: dict[str, Any] = {"hidden": 64, "heads": 8, "query_groups": 4, "gated": True, "bias": True}
WARM_UP = 2
_FOLDERS = ("/megatron/core/", "/megatron/training/", f"{ROOT}/megatron_eopt/")


def run(context: Context) -> Outcome:
    """List the waits of each optimizer's step; all but the allowed one are problems."""
    outcome = context.outcome
    on_gpu = context.device == "cuda"
    for name in OPTIMIZERS:
        with outcome.noting(name):
            waits = context.on_ranks(
                context.ranks if on_gpu else 1, waits_on_gpu if on_gpu else waits_of_dry_run, name
            )[0]
            outcome.figures[name] = waits
            outcome.problems += [
                f"{name}: the host waits {count} times in {place}"
                for place, count in waits.items()
                if name != "adaptive_muon" or MAY_WAIT not in place
            ]
    if not outcome.problems:
        outcome.headline = "the host waits at most for the gradient norm of adaptive Muon"
    return outcome


def waits_of_dry_run(name: str) -> dict[str, int]:
    """Return which functions read GPU values in a step of one of two ranks, and how often."""
    # imported late, since GPU machines need not have what the dry run needs
    from megatron_eopt.tools.dry_run import dry_world, report_of

    # the dry world creates its own process groups
    dist.destroy_process_group()
    with dry_world(0, 2):
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        model = tiny_gpt(**MODEL, perform_initialization=False)
        sharded = {"use_distributed_optimizer": True}
        config = EmergingOptimizerConfig(optimizer=name, lr=0.01, **sharded)
        optimizer = get_megatron_optimizer(config, [wrap_ddp(model, **sharded)])
        return dict(report_of(optimizer, lambda: None).host_reads)


def waits_on_gpu(name: str) -> dict[str, int]:
    """Return where the host waits in a step, and how often; then make each wait an error."""
    chunk, optimizer = build({**MODEL, "dtype": torch.bfloat16}, {"optimizer": name})
    for step in range(WARM_UP):
        give_gradients(chunk, step)
        optimizer.step()
    give_gradients(chunk, WARM_UP)
    torch.cuda.synchronize()
    with _noted() as waits:
        optimizer.step()
    give_gradients(chunk, WARM_UP + 1)
    torch.cuda.synchronize()
    try:
        with _refused():
            optimizer.step()
    except RuntimeError as error:
        place = _place(traceback.extract_tb(error.__traceback__))
        waits[f"{place} ({str(error).splitlines()[0]})"] += 1
    return dict(waits)


@contextmanager
def _noted() -> Iterator[Counter[str]]:
    """Count the waits in the block, of which torch warns, by place."""
    waits: Counter[str] = Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            waits[_place(traceback.extract_stack())] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def _refused() -> Iterator[None]:
    """Make every wait in the block an error, except in :data:`MAY_WAIT`."""
    real = GradNorm.read

    def read(norm: GradNorm) -> float:
        torch.cuda.set_sync_debug_mode("default")
        try:
            return real(norm)
        finally:
            torch.cuda.set_sync_debug_mode("error")

    with patch.object(GradNorm, "read", read):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _place(stack: traceback.StackSummary) -> str:
    """Return the innermost frame in Megatron or this package, or :data:`MAY_WAIT`."""
    ours = [frame for frame in stack if any(part in frame.filename for part in _FOLDERS)]
    if any(frame.name == "read" and "gradients" in frame.filename for frame in ours):
        return MAY_WAIT
    innermost = ours[-1] if ours else stack[-1]
    return f"{innermost.filename}:{innermost.lineno} {innermost.name}"
