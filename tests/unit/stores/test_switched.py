"""Another optimizer goes on from a checkpoint: moments begin anew together, or not at all."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing

from megatron_eopt import checkpoints
from megatron_eopt.base.errors import ConfigurationError
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.stores.full_state import Case, build, differences, full_state, sharded, steps
from tests.unit.stores.runs import set_lr

SHARDED = {"use_distributed_optimizer": True}


def switched(folder: str, before: str, after: str) -> tuple[str, float]:
    """Return a refusal, and how far a run that heeds it gets from one with weights alone."""
    Path(folder).mkdir(exist_ok=True)
    first, case = Case(before, ddp=SHARDED), Case(after, ddp=SHARDED)
    chunk, optimizer = build(first)
    steps(first, chunk, optimizer, 0, 3)
    dist_checkpointing.save(sharded(first, chunk, optimizer, is_loading=False), folder)
    with pytest.raises(ConfigurationError) as refusal:
        trained(folder, case)
    named = re.search(r"--checkpoint-fresh-state ([\w ]+) \(", str(refusal.value))
    assert named is not None
    pairs = zip(trained(folder, case, named[1].split()), trained(folder, case, None), strict=True)
    return named[1], max(float((one - other).abs().max()) for one, other in pairs)


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
    ("before", "after"),
    [
        ("lion", "adam"),
        *(pytest.param(n, "soap", marks=pytest.mark.long) for n in ("adam", "lion")),
    ],
)
def test_moments_begin_anew_together(tmp_path, before, after):
    for _, distance in run_ranks(2, switched, str(tmp_path / "c"), before, after):
        assert distance == 0


PLAIN = {"use_distributed_optimizer": False}
NORMUON = {"adaptive_muon_moment2_method": "normuon"}
ADAM_AND_SOAP = ("L", "R", "Q_L", "Q_R", "exp_avg", "exp_avg_sq")


def begun_anew(case: Case, folder: str, fresh: Sequence[str]) -> list[str]:
    """Return how a run that goes back to Adam's weights differs from one that begins there."""
    adam = Case("adam", ddp=case.ddp, config=case.ddp)
    Path(folder).mkdir(exist_ok=True)
    chunk, optimizer = build(adam)
    steps(adam, chunk, optimizer, 0, 2)
    dist_checkpointing.save(sharded(adam, chunk, optimizer, is_loading=False), folder)
    states = []
    for count in (0, 3):
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 10, 10 + count)
        wanted = sharded(case, chunk, optimizer, is_loading=True)
        loaded = checkpoints.load(wanted, folder, fresh=fresh, momentum_from_adam=bool(fresh))
        chunk.module.load_state_dict(loaded["model"], strict=False)
        optimizer.load_state_dict(loaded["optimizer"])
        set_lr(optimizer, optimizer.config)
        states.append(full_state(case, chunk, optimizer))
        steps(case, chunk, optimizer, 2, 3)
        states.append(full_state(case, chunk, optimizer))
        forget_megatron()
    return differences(states[0], states[2]) + differences(states[1], states[3])


@pytest.mark.parametrize(
    ("name", "storage", "config", "fresh"),
    [
        ("muon", PLAIN, {}, ()),
        ("muon", SHARDED, {"muon_momentum_dtype": "int8"}, ()),
        ("muon", SHARDED, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, ()),
        # momenta go on, and what is beside them does not
        ("adaptive_muon", SHARDED, NORMUON, ("moment2_buffer",)),
        ("soap", SHARDED, {}, ADAM_AND_SOAP),
        pytest.param("soap", PLAIN, {}, ADAM_AND_SOAP, marks=pytest.mark.long),
    ],
)
def test_what_starts_fresh_is_reset_in_an_optimizer_that_has_stepped(
    tmp_path, name, storage, config, fresh
):
    case = Case(name, ddp=storage, config={**config, **storage})
    for differing in run_ranks(2, begun_anew, case, str(tmp_path / "c"), fresh):
        assert not differing


def refused_late(rank: int) -> tuple[str, bool]:
    """Let one rank lack a value that was asked for; return the error, and whether more changed."""
    case = Case("adam", ddp=SHARDED)
    chunk, optimizer = build(case)
    state = sharded(case, chunk, optimizer, is_loading=True)["optimizer"]
    for group in state["optimizer"]["param_groups"]:
        group.update(eps=0.5, step=7)
    state["requests"] = state["requests"].obj
    if torch.distributed.get_rank() == rank:
        del state["param_state"]["values"]["1"]
    # a second time, too
    for _ in range(2):
        with pytest.raises(ConfigurationError) as error:
            optimizer.load_state_dict(state)
    changed = any(group["eps"] == 0.5 for group in optimizer.param_groups)
    return str(error.value), changed or optimizer.chained_optimizers[0].steps == 7


@pytest.mark.parametrize("rank", [0, 1])
def test_a_load_that_is_refused_has_changed_nothing(rank):
    (message, changed), (other, also) = run_ranks(2, refused_late, rank)
    assert message == other
    assert "must hold this state" in message
    assert not changed
    assert not also
