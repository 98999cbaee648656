"""Parameters of one optimizer with different counts of steps, and names that copies share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import Tensor

from megatron_eopt import EmergingOptimizerConfig, checkpoints, get_megatron_optimizer
from megatron_eopt.base.names import GLOBAL_NAME_ATTRIBUTE
from megatron_eopt.settings import registry
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.fsdp2.model import eager
from tests.unit.megatron_fsdp import runs as managed
from tests.unit.stores import full_state
from tests.unit.stores.full_state import Case, differences
from tests.unit.stores.runs import DENSE, MOE, Run, make_chunk, set_lr

JOINING = "*linear_proj.weight"


def after_joining(case: Case, before: str, folder: Path) -> tuple[Any, Any]:
    """Return a run in which some matrices, whose optimizer was another, do steps 8 and 9."""
    earlier = replace(case, overrides={JOINING: before})
    chunk, optimizer = full_state.build(earlier)
    full_state.steps(earlier, chunk, optimizer, 0, 8)
    if dist.get_rank() == 0:
        (folder / "before").mkdir()
    dist.barrier()
    saved = full_state.sharded(earlier, chunk, optimizer, is_loading=False)
    dist_checkpointing.save(saved, str(folder / "before"))
    forget_megatron()
    chunk, optimizer = full_state.build(case)
    wanted = full_state.sharded(case, chunk, optimizer, is_loading=True)
    loaded = checkpoints.load(wanted, str(folder / "before"))
    full_state.unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    set_lr(optimizer, optimizer.config)
    full_state.steps(case, chunk, optimizer, 8, 10)
    return chunk, optimizer


@eager
def gone_on(case: Case, before: str, folder: Path, form: str) -> tuple[list[str], int]:
    """Return what differs after two more steps from a checkpoint, and how many counts it has."""
    chunk, optimizer = after_joining(case, before, folder)
    weights = [param.detach().clone() for param in chunk.parameters()]
    path = folder / "own"
    if form == "torch":
        optimizer.save_state_dict_to_file(str(path))
    else:
        if dist.get_rank() == 0:
            path.mkdir()
        dist.barrier()
        saved = full_state.sharded(case, chunk, optimizer, is_loading=False)
        dist_checkpointing.save(saved, str(path))
    full_state.steps(case, chunk, optimizer, 10, 12)
    whole = full_state.full_state(case, chunk, optimizer)
    forget_megatron()
    chunk, optimizer = full_state.build(case)
    for param, weight in zip(chunk.parameters(), weights, strict=True):
        param.data.copy_(weight)
    if form == "torch":
        optimizer.load_state_dict_from_file(str(path))
    else:
        wanted = full_state.sharded(case, chunk, optimizer, is_loading=True)
        optimizer.load_state_dict(checkpoints.load(wanted, str(path))["optimizer"])
    set_lr(optimizer, optimizer.config)
    full_state.steps(case, chunk, optimizer, 10, 12)
    found = full_state.full_state(case, chunk, optimizer)
    return differences(whole, found), sum(".step." in key for key in whole)


def adaptive(method: str) -> Case:
    fields = {"adaptive_muon_moment2_method": method, "adaptive_muon_bias_correction": True}
    return Case("adaptive_muon", DENSE, config=fields)


JOINED = {
    "AdaMuon": (adaptive("adamuon"), "adam"),
    "NorMuon": (adaptive("normuon"), "lion"),
    "NAMO": (adaptive("namo"), "lion"),
}


@pytest.mark.parametrize("form", ["torch", "torch_dist"])
@pytest.mark.parametrize("name", JOINED)
def test_counts_of_steps_go_on_as_they_were(tmp_path, name, form):
    case, before = JOINED[name]
    for differing, counts in run_ranks(2, gone_on, case, before, tmp_path, form):
        assert not differing
        assert counts  # which are not all the driver's


class Counting(torch.optim.Optimizer):
    """Counts steps in its groups, as fused optimizers do: those without members are skipped."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _init_group(self, group: Any, skip_non_grad_params: bool = True) -> None:
        """There is no state."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                param.add_(param.grad, alpha=-group["lr"] / group["step"])


@eager
def stepped_in_groups(storage: dict[str, Any]) -> dict[str, Tensor]:
    if not registry.is_registered("counting"):
        registry.register_optimizer("counting", Counting)
    fields = {"muon_wave_mb": 0.001, **storage}
    case = Case("counting", DENSE, ddp=storage, config=fields)
    chunk = make_chunk(case.run)
    config = EmergingOptimizerConfig(optimizer="counting", lr=0.01, clip_grad=0.0, **fields)
    # a group of its own
    own = {ParamKey(name=JOINING): {"wd_mult": 0.5}}
    optimizer = get_megatron_optimizer(config, [chunk], own)
    full_state.steps(case, chunk, optimizer, 0, 4)
    return {name: param.detach().clone() for name, param in chunk.named_parameters()}


def test_owners_count_in_groups_that_are_not_in_every_batch():
    def run(storage: dict[str, Any]) -> dict[str, Tensor]:
        return run_ranks(1, stepped_in_groups, storage)[0]

    plain, owned = (run({"use_distributed_optimizer": is_sharded}) for is_sharded in (False, True))
    for name, weight in plain.items():
        torch.testing.assert_close(owned[name], weight, msg=name)


def names_of_copies() -> list[str]:
    """Return the global names of a tied embedding's copy on this stage."""
    model = {**DENSE, "untied": False, "layers": 2}
    chunk, _ = full_state.build(Case("muon", model, parallel={"pp": 2}))
    params = [param for param in chunk.parameters() if getattr(param, "shared_embedding", False)]
    return [getattr(param, GLOBAL_NAME_ATTRIBUTE) for param in params]


def test_copies_of_a_tied_embedding_have_one_name():
    assert run_ranks(2, names_of_copies) == [["embedding.word_embeddings.weight"]] * 2


@eager
def names_of_experts() -> list[str]:
    run = Run(model=MOE, parallel={"ep": 2}, config={"optimizer": "muon"})
    optimizer = managed.make_optimizer(run, managed.make_chunk(run))
    shards = [shard for driver in optimizer.members[-1].drivers for shard in driver.shards]
    return sorted(shard.global_name for shard in shards if "local_experts" in shard.name)


def test_experts_in_megatron_fsdp_have_their_names_in_the_whole_model():
    mine, others = run_ranks(2, names_of_experts, timeout=120)
    assert len(mine) == len(others) > 0
    assert not set(mine) & set(others)
