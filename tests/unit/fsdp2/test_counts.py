"""What a step sends: collectives and bytes, counted exactly."""

import pytest
from torch.distributed.tensor.debug import CommDebugMode

from megatron_eopt.megatron_fsdp import build_optimizer
from tests.harness import run_ranks
from tests.unit.fsdp2.models import config, is_managed, make_model, set_gradients


def count(layout, settings):
    """Return collectives by name, the plans' calls, and where matrices are computed."""
    model = make_model(layout)
    optimizer = build_optimizer(model, settings)
    set_gradients(model, 0)
    with CommDebugMode() as mode:
        optimizer.step()
    counts = {str(name).rpartition(".")[2]: n for name, n in mode.get_comm_counts().items()}
    plans = [item.plan for rule in optimizer.update_rules for item in rule.schedules]
    here = [len(batch.matrices) for plan in plans for wave in plan.waves for batch in wave.batches]
    return counts, [(plan.calls, len(plan.waves)) for plan in plans], sum(here)


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
