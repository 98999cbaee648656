"""Steps on GPU tensors, without a GPU: devices are not mixed, and only the norm is waited for."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_check.replay import figures
from megatron_eopt.tools.dry_run import dry_world, report_of
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.fake_gpu import Waits, fake_gpu
from tests.harness.tiers import mostly_long
from tests.unit.dry_run.optimizers import BF16, FSDP2, dry_optimizer
from tests.unit.storage.full_state import Case
from tests.unit.storage.runs import DENSE, MOE, PLAIN, SHARDED

GATED = DENSE | BF16 | {"gated": True, "query_groups": 2}
OPTIMIZERS = ("muon", "adaptive_muon", "soap", "lion", "adam", "sgd")
MODES = ("blockwise", "duplicated", "distributed", "exchange", "auto")
CASES = {
    **{f"{name}, fragments": (2, Case(name, GATED)) for name in OPTIMIZERS},
    **{f"{name}, plain": (2, Case(name, GATED, {"tp": 2}, config=PLAIN)) for name in OPTIMIZERS},
    **{mode: (4, Case("muon", GATED, {"tp": 2}, config={"muon_tp_mode": mode})) for mode in MODES},
    **{
        f"momentum in {dtype}": (2, Case("muon", GATED, config={"muon_momentum_dtype": dtype}))
        for dtype in ("bf16", "int8", "fp8")
    },
    "experts": (2, Case("muon", MOE | BF16, {"ep": 2})),
    "pipeline": (2, Case("muon", GATED, {"pp": 2})),
    "float32": (2, Case("muon", DENSE)),
    "watched": (2, Case("muon", GATED, config={"log_optimizer_stats": True})),
    "teams": (4, Case("muon", GATED, config={"muon_max_ranks_per_matrix": 2})),
    "Gram matrices": (2, Case("muon", GATED, config={"muon_algorithm": "gram"})),
    **{f"{name}, FSDP2": (2, replace(FSDP2, optimizer=name)) for name in OPTIMIZERS[:4]},
}
USUAL = (
    "muon, fragments; adaptive_muon, fragments; soap, fragments; muon, plain; distributed; "
    "momentum in int8; experts; watched; teams; soap, FSDP2"
).split("; ")
"""Of every way to store, compute and keep state one; the others are for the long tier."""

NORM = {"megatron_eopt.wrappers.gradients.read"}


def on_gpu(world_size: int, case: Case) -> tuple[set[str], set[str], list[str]]:
    """Return the devices of state, who waited, and what had tensors of two devices."""
    dist.destroy_process_group()
    with dry_world(0, world_size, cuda=fake_gpu()):
        optimizer, give_gradients = dry_optimizer(case)
        give_gradients()
        # in it megatron-core asks the ranks once, by a tensor of the host's values, who has what
        optimizer.step()
        with Waits() as waits:
            report_of(optimizer, give_gradients)
        states = [s for m in optimizer.chained_optimizers for s in m.optimizer.state.values()]
        values = [v for s in states for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]
        return {str(value.device) for value in values}, waits.reads, waits.crossings


def in_storage(name: str, **config: Any) -> tuple[int, Case]:
    """Return the number of ranks of a case, and it with a model that is wrapped for its storage."""
    world_size, case = CASES[name]
    config = SHARDED | case.config | config
    return world_size, replace(case, config=config, ddp={key: config[key] for key in SHARDED})


@pytest.mark.parametrize("name", mostly_long(CASES, *USUAL))
def test_a_step_stays_on_the_device(name):
    devices, reads, crossings = run_ranks(1, on_gpu, *in_storage(name, clip_grad=1.0), cpu=False)[0]
    assert devices <= {"cuda:0"}
    assert reads <= NORM
    assert crossings == []


OFF_LOADED = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}


@pytest.mark.parametrize("name", ["muon, fragments", "muon, FSDP2", "soap, FSDP2"])
def test_off_loaded_state_rests_on_the_host(name):
    # what is updated on the device has been copied there, else torch would raise an error
    devices, reads, _ = run_ranks(1, on_gpu, *in_storage(name, **OFF_LOADED), cpu=False)[0]
    assert devices == {"cpu"}
    assert reads <= NORM


@on_ranks(1, cpu=False)
def test_what_mixes_devices_or_waits_is_seen():
    dist.destroy_process_group()
    with dry_world(0, 2, cuda=fake_gpu()), Waits() as waits:
        there = torch.ones(3, device="cuda")
        torch.tensor([1.0], device="cuda")
        there.cpu()
        torch.ones(()).item()
        there.sum().item()
        with pytest.raises(RuntimeError) as refused:
            there.add(torch.ones(3))
    assert waits.crossings == ["aten._to_copy.default"] * 2
    assert waits.reads == {f"{__name__}.test_what_mixes_devices_or_waits_is_seen"}
    assert "cuda:0" in str(refused.value)
    assert "cpu" in str(refused.value)


@pytest.mark.parametrize(
    "name", mostly_long(["muon, fragments", "adaptive_muon, plain"], "muon, fragments")
)
@on_ranks(1, cpu=False)
def test_a_plan_counts_what_a_gpu_will_do(name):
    """Compare what is counted on tensors of a CPU that stand for a GPU's, and on a GPU's."""
    world_size, case = in_storage(name, clip_grad=1.0)
    dist.destroy_process_group()
    found = []
    for cuda in (None, fake_gpu()):
        with dry_world(0, world_size, cuda=cuda):
            optimizer, give_gradients = dry_optimizer(case)
            give_gradients()
            optimizer.step()
            # as text, since process groups end with the world
            found.append(list(map(str, figures(report_of(optimizer, give_gradients)))))
    assert found[0] == found[1]
