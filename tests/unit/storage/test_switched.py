"""Another optimizer goes on from a checkpoint: moments begin anew together, or not at all."""

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.harness.tiers import mostly_long
from tests.unit.storage.full_state import Case, build, resume, save_one, sharded, steps
from tests.unit.storage.runs import DENSE, REPLICATED, set_lr


def switched(folder: str, before: str, after: str) -> tuple[str, float]:
    """Return what a refusal names, if any, and how far the run gets from one with weights alone."""
    case, named = Case(after), ""
    save_one(Case(before), folder, 3)
    try:
        after_load = trained(folder, case)
    except ConfigurationError as error:
        found = re.search(r"--ckpt-allow-missing-optim-state ([\w ]+) \(", str(error))
        assert found is not None
        named = found[1]
        after_load = trained(folder, case, named.split())
    pairs = zip(after_load, trained(folder, case, None), strict=True)
    return named, max(float((one - other).abs().max()) for one, other in pairs)


def trained(folder: str, case: Case, fresh: Sequence[str] | None = ()) -> list[torch.Tensor]:
    """Return matrices after two more steps, of weights alone if ``fresh`` is None."""
    chunk, optimizer = build(case)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    if fresh is None:
        del wanted["optimizer"]
    loaded = checkpoints.load(wanted, folder, fresh=fresh or ())
    chunk.module.load_state_dict(loaded["model"], strict=False)
    if fresh is None:
        optimizer.reload_model_params()
    else:
        optimizer.load_state_dict(loaded["optimizer"])
    set_lr(optimizer, optimizer.config)
    steps(case, chunk, optimizer, 3, 5)
    return [p.detach().clone() for n, p in chunk.named_parameters() if "linear_fc2.weight" in n]


@pytest.mark.parametrize(
    ("before", "after", "named"),
    mostly_long(
        [("lion", "adam", "exp_avg_sq"), ("adam", "soap", ""), ("lion", "soap", "")],
        ("lion", "adam", "exp_avg_sq"),
    ),
)
def test_moments_begin_anew_together(tmp_path, before, after, named):
    for found, distance in run_ranks(2, switched, str(tmp_path / "c"), before, after):
        assert (found, distance) == (named, 0)


def refused_late(folder: str) -> str:
    """Let one rank lack a value that was asked for; return the error."""
    case = Case("adam")
    save_one(case, folder)
    chunk, optimizer = build(case)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    state = dist_checkpointing.load(wanted, folder)["optimizer"]
    if torch.distributed.get_rank() == 1:
        del state["param_state"]["values"]["1"]
    with pytest.raises(ConfigurationError) as error:
        optimizer.load_state_dict(state)
    return str(error.value)


def test_state_that_one_rank_has_not_loaded_is_refused_on_all(tmp_path):
    message, other = run_ranks(2, refused_late, str(tmp_path))
    assert message == other
    assert "must hold this state" in message


def refused_after_steps(folder: str, fields: dict[str, Any]) -> None:
    save_one(Case("adam", **fields), folder)
    case = Case("muon", **fields)
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    with pytest.raises(ConfigurationError, match="optimizer has stepped and would not start fresh"):
        checkpoints.load(wanted, folder)


@pytest.mark.parametrize("fields", [{}, REPLICATED], ids=["sharded", "plain"])
def test_an_optimizer_that_has_stepped_does_not_start_state_fresh(tmp_path, fields):
    run_ranks(2, refused_after_steps, str(tmp_path), fields)


def mains_after_load(folder: str) -> tuple[int, list[float]]:
    """Return the number of main weights, and how far each is from the model's weight."""
    save_one(Case("muon", **REPLICATED), folder)
    forget_megatron()
    case = Case("muon", {**DENSE, "dtype": torch.bfloat16}, **REPLICATED)
    _, optimizer = resume(case, folder)
    items = [item for link in optimizer.chained_optimizers for item in link.shards]
    assert any(item.param.abs().max() > 0 for item in items)
    return len(items), [float((i.main - i.param.float()).abs().max()) for i in items]


def test_main_weights_that_a_checkpoint_lacks_are_the_models(tmp_path):
    """Weights in float32 are their own main weights, and are saved once."""
    count, distances = run_ranks(1, mains_after_load, str(tmp_path))[0]
    assert count > 10
    assert distances == [0.0] * count
