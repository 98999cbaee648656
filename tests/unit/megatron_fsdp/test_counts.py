"""What a step sends: collectives and bytes, counted exactly."""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.harness import run_ranks
from tests.unit.megatron_fsdp.runs import inject, make_chunk, make_optimizer
from tests.unit.stores.runs import Run


def count(run):
    """Return collectives by name, plans' calls and waves, and bytes counted two ways."""
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk)
    inject(run, chunk, 0)
    optimizer.prepare_grads()
    inner = optimizer.members[0].storage.optimizer
    sent = []
    plain = torch.distributed.all_to_all_single

    def counting(output, input, output_sizes, input_sizes, *args, **kwargs):
        rank = torch.distributed.get_rank(kwargs.get("group"))
        mine = input_sizes[rank]
        sent.append((input.numel() - mine) * input.element_size())
        return plain(output, input, output_sizes, input_sizes, *args, **kwargs)

    torch.distributed.all_to_all_single = counting
    try:
        with CommDebugMode() as mode:
            inner.step()
    finally:
        torch.distributed.all_to_all_single = plain
    counts = {str(name).rpartition(".")[2]: n for name, n in mode.get_comm_counts().items()}
    plans = [(plan.calls, len(plan.waves)) for plan in inner.plans]
    return counts, plans, sum(plan.bytes_sent for plan in inner.plans), sum(sent)


@pytest.mark.parametrize("wave_mb", [64.0, 0.01])
def test_two_collectives_a_wave(wave_mb):
    run = Run(config={"optimizer": "muon", "muon_wave_mb": wave_mb})
    for counts, plans, planned, sent in run_ranks(2, count, run):
        calls = sum(calls for calls, _ in plans)
        waves = sum(waves for _, waves in plans)
        # of a small wave all may lie at its owners already
        assert calls == 2 * waves if wave_mb > 1 else calls <= 2 * waves
        assert (waves > 1) == (wave_mb < 1)
        assert counts == {"alltoall_base_": calls}
        assert planned == sent > 0
