"""What a step sends: collectives and bytes, counted exactly."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.model import Model, config, cut, is_managed, make_model, set_gradients


def count(layout, settings):
    """Return collectives by name, the plans' calls, and where matrices are computed."""
    model = make_model(layout)
    optimizer = build_optimizer(model, settings)
    set_gradients(model, 0)
    with CommDebugMode() as mode:
        optimizer.step()
    counts = {str(name).rpartition(".")[2]: n for name, n in mode.get_comm_counts().items()}
    here = [len(b.matrices) for p in optimizer.plans for w in p.waves for b in w.batches]
    return counts, [(plan.calls, len(plan.waves)) for plan in optimizer.plans], sum(here)


@pytest.mark.parametrize(
    ("world", "layout", "engines"),
    [(2, "fsdp", 1), (4, "fsdp", 1), (4, "hsdp", 1), (4, "tp", 2), (2, "optim", 1)],
)
def test_two_collectives_a_wave_and_each_matrix_once(world, layout, engines):
    results = run_ranks(world, count, layout, config(), cpu=is_managed(layout))
    for counts, plans, _ in results:
        assert plans == [(2, 1)] * engines
        assert counts["alltoall_base_"] == 2 * engines
        # Megatron-FSDP gathers the stepped weights
        assert is_managed(layout) or len(counts) == 1
    # gate, up, down, tiny, wide and five experts; what tensor parallelism does not cut is cut by
    # each of the two FSDP groups: tiny and the experts
    assert sum(here for *_, here in results) == (16 if layout == "tp" else 10)


class Even(torch.nn.Module):
    """Eight matrices that divide evenly over two and four ranks."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abcdefgh":
            setattr(self, name, torch.nn.Linear(16, 16, bias=False))


def sent(layout):
    model = cut(Even(), layout, "a")
    optimizer = build_optimizer(model, config(muon_fp32_matmul_prec="medium"))
    return sum(plan.bytes_sent for plan in optimizer.plans)


def test_even_shards_send_two_bytes_an_element_each_way():
    of_world = {world: sum(run_ranks(world, sent, "fsdp", cpu=False)) for world in (2, 4)}
    numel = 8 * 16 * 16
    for world, found in of_world.items():
        # in and out, what is not at its owner already, in bfloat16
        assert found == 2 * 2 * numel * (world - 1) // world
    # replicas share the work for no more bytes
    assert sum(run_ranks(4, sent, "hsdp", cpu=False)) <= 2 * of_world[2]
    optimizer = build_optimizer(Model(), config())
    assert [plan.calls for plan in optimizer.plans] == [0]
