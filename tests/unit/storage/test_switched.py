"""Another optimizer goes on from a checkpoint: state begins anew as a whole, or is refused."""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.agreement import gather_unique
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.testing.scene import forget_megatron
from tests.harness.each_rank import on_ranks
from tests.unit.storage.full_state import Case, build, resume, save_one, sharded, steps
from tests.unit.storage.runs import DENSE, REPLICATED, set_lr


def trained(folder: Path, case: Case, *, with_state: bool) -> list[torch.Tensor]:
    """Return matrices after two more steps."""
    chunk, optimizer = build(case)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    if not with_state:
        del wanted["optimizer"]
    loaded = checkpoints.load(wanted, folder)
    chunk.module.load_state_dict(loaded["model"], strict=False)
    if with_state:
        optimizer.load_state_dict(loaded["optimizer"])
    else:
        optimizer.reload_model_params()
    set_lr(optimizer, optimizer.config)
    steps(case, chunk, optimizer, 3, 5)
    return [p.detach().clone() for n, p in chunk.named_parameters() if "linear_fc2.weight" in n]


@on_ranks(2)
def test_moments_of_another_optimizer_begin_anew_together(tmp_path):
    """Adam takes matrices as it takes them from Lion's weights alone."""
    save_one(Case("lion"), tmp_path / "c", 3)
    both = (trained(tmp_path / "c", Case("adam"), with_state=kept) for kept in (True, False))
    assert [torch.equal(one, other) for one, other in zip(*both, strict=True)] == [True, True]


@on_ranks(2)
def test_state_that_one_rank_has_not_loaded_is_refused_on_all(tmp_path):
    case = Case("adam")
    save_one(case, tmp_path)
    chunk, optimizer = build(case)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    state = dist_checkpointing.load(wanted, str(tmp_path))["optimizer"]
    if torch.distributed.get_rank() == 1:
        del state["param_state"]["values"]["1"]
    told = "must have all state of the same optimizer"
    with pytest.raises(ConfigurationError, match=told) as error:
        optimizer.load_state_dict(state)
    assert len(gather_unique([str(error.value)])) == 1


@pytest.mark.parametrize("fields", [{}, REPLICATED], ids=["sharded", "plain"])
@on_ranks(2)
def test_an_optimizer_that_has_stepped_does_not_start_state_fresh(tmp_path, fields):
    save_one(Case("adam", **fields), tmp_path)
    case = Case("muon", **fields)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    with pytest.raises(ConfigurationError, match="would start fresh, but the optimizer has"):
        checkpoints.load(wanted, tmp_path)


@on_ranks(1)
def test_main_weights_that_a_checkpoint_lacks_are_the_models(tmp_path):
    """Weights in float32 are their own main weights, and are saved once."""
    save_one(Case("muon", **REPLICATED), tmp_path)
    forget_megatron()
    case = Case("muon", {**DENSE, "dtype": torch.bfloat16}, **REPLICATED)
    _, optimizer = resume(case, tmp_path)
    items = [item for link in optimizer.chained_optimizers for item in link.shards]
    assert any(item.param.abs().max() > 0 for item in items)
    assert len(items) > 10
    assert all(torch.equal(item.main, item.param.float()) for item in items)
