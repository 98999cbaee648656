"""Checkpoints between releases of upstream: state that gained a key."""

from typing import Any

import pytest
import torch
from emerging_optimizers.scalar_optimizers import Lion

from megatron_eopt.optimizers import built_in as _built_in  # noqa: F401  registers optimizers
from megatron_eopt.optimizers import scalar
from megatron_eopt.settings import registry
from tests.harness import run_ranks
from tests.unit.checkpoint.test_state import resume, save
from tests.unit.storage.full_state import Case, build, full_state, steps
from tests.unit.storage.runs import DENSE

SMALL = {**DENSE, "layers": 1}


class NextLion(Lion):
    """Lion that counts its steps in every state."""

    def _init_group(self, group: dict[str, Any], skip_non_grad_params: bool = True) -> None:
        for param in group["params"]:
            if not (skip_non_grad_params and param.grad is None) and not self.state[param]:
                self.state[param]["step"] = 0
                self.state[param]["exp_avg"] = torch.zeros_like(param.data)

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.state[param]["step"] += 1


def use(release: type) -> None:
    """Let this process have the optimizer of one release or the other."""
    registry.entry_of("lion").optimizer_cls = scalar.Lion = release


def saved(case: Case, folder: str, release: type) -> None:
    use(release)
    try:
        save(case, folder)
    finally:
        use(Lion)


def resumed(case: Case, folder: str, release: type) -> tuple[dict[str, Any], dict[str, Any], set]:
    """Load and do one step; return what three steps give, what this gives, and its counts."""
    use(release)
    try:
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 3)
        whole = full_state(case, chunk, optimizer)
        chunk, optimizer = resume(case, folder)
        steps(case, chunk, optimizer, 2, 3)
        children = optimizer.chained_optimizers
        states = [state for child in children for state in child.optimizer.state.values()]
        return whole, full_state(case, chunk, optimizer), {s.get("step") for s in states}
    finally:
        use(Lion)


WHOLE = {"use_distributed_optimizer": False}
STORAGES: dict[str, dict[str, Any]] = {"sharded": {}, "plain": {"ddp": WHOLE, "config": WHOLE}}


@pytest.mark.tested_release
@pytest.mark.parametrize("storage", ["sharded", pytest.param("plain", marks=pytest.mark.long)])
def test_lions_counts_are_carried_over(tmp_path, storage):
    case = Case("lion", SMALL, **STORAGES[storage])
    for first, then in ((Lion, NextLion), (NextLion, Lion), (NextLion, NextLion)):
        folder = tmp_path / f"{first.__name__}{then.__name__}"
        run_ranks(2, saved, case, str(folder), first)
        for whole, after, counts in run_ranks(2, resumed, case, str(folder), then):
            assert whole.keys() == after.keys()
            for key, value in whole.items():
                # Lion's rounding is that of its release: none
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(after[key])), key
            assert {int(count) for count in counts} == {3} if then is NextLion else {None}


def _synced() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for ddp, config in (({}, {}), (WHOLE, {}), (WHOLE, WHOLE)):
            case = Case("muon", {**SMALL, "dtype": dtype}, ddp=ddp, config=config)
            for child in (False, True):
                chunk, optimizer = build(case)
                steps(case, chunk, optimizer, 0, 1)
                before = [param.detach().clone() for param in chunk.parameters()]
                for param in chunk.parameters() if dtype == torch.bfloat16 else ():
                    param.data.zero_()
                for part in optimizer.chained_optimizers if child else [optimizer]:
                    part.quantize_and_sync_model_params_from_main_params()
                assert all(map(torch.equal, chunk.parameters(), before)), (case, child)


def test_the_model_gets_the_main_weights_when_asked():
    run_ranks(2, _synced)
