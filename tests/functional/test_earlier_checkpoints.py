"""What release 0.1.0 saved is loaded bit by bit, and training goes on as it would have."""

import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt import checkpoints
from megatron_eopt.fsdp2 import build_optimizer
from tests.functional.earlier_checkpoints import FSDP2, megatron_cases
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.fsdp2.model import eager, make_model, set_gradients, shard, weights, whole
from tests.unit.stores.full_state import (
    build,
    differences,
    full_state,
    set_lr,
    sharded,
    steps,
    unwrapped,
)

ARCHIVES = Path(__file__).parent / "earlier"
OF_ITS_SIZE = ("plain-soap", "sharded-adam-by-bucket")
"""State of SOAP on tensor-parallel slabs, and Megatron's buckets, belong to one parallel size."""

AT_THE_SAME_LAYOUT = (*OF_ITS_SIZE, "plain-normuon", "sharded-normuon")
AT_ONE_RANK = tuple(name for name in megatron_cases() if name not in OF_ITS_SIZE)

FAR = 0.05
"""Of a tensor's way over two steps: bfloat16 products differ between machines by a tenth of it,
and a momentum that was lost by ten times as much.

SOAP's way is not compared. Where its factors have no rank yet, their eigenvectors are rounding
noise: 6e-8 of it moves a weight by up to nine tenths of its way, so processors differ. That what
is loaded is all that a step depends on, tests of resuming show on one machine."""


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("earlier")
    for path in ARCHIVES.glob("*.zip"):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder / path.stem)
    return str(folder)


def expected(folder: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(Path(folder, name, "expected.pt"), weights_only=True)
    return found


def regrouped(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with what this release saves under other names in an order of its own.

    Counts of steps are saved once for all matrices now, where they are equal. AdaMuon's second
    moments had a tensor for each logical matrix, and have the parameter's shape now: here they
    become sorted numbers.
    """
    moments: dict[str, list[torch.Tensor]] = {}
    result = {}
    for key, value in state.items():
        old = re.fullmatch(r"optimizer\.matrix_state\.moment2_buffer\.(.+?)\.\d+\.\d+", key)
        new = re.fullmatch(r"optimizer\.state\.moment2_buffer\.(.+)", key)
        if match := old or new:
            moments.setdefault(match[1], []).append(value.flatten())
        elif ".matrix_state.step." not in key:
            result[key] = value
    sorted_moments = {key: torch.cat(values).sort().values for key, values in moments.items()}
    return {**result, **sorted_moments}


def too_far(
    name: str, saved: dict[str, Any], later: dict[str, Any], found: dict[str, Any]
) -> list[str]:
    """Return the names of main weights of a case that went elsewhere than they should have."""
    if name.endswith("soap"):
        return []
    return [
        key
        for key, value in later.items()
        if (found[key].double() - value.double()).norm()
        > FAR * (value.double() - saved[key].double()).norm() + 1e-12
    ]


def of_megatron(folder: str, names: tuple[str, ...], one: bool) -> dict[str, tuple[Any, Any]]:
    """Load and go on; return by case what differs, and what went elsewhere."""
    results = {}
    for name in names:
        case = megatron_cases()[name]
        case = replace(case, parallel={} if one else case.parallel)
        chunk, optimizer = build(case)
        for param in chunk.parameters():
            param.data.zero_()
        wanted = sharded(case, chunk, optimizer, is_loading=True)
        loaded = checkpoints.load(wanted, Path(folder, name))
        unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
        optimizer.load_state_dict(loaded["optimizer"])
        set_lr(optimizer, optimizer.config)
        state = full_state(case, chunk, optimizer)
        steps(case, chunk, optimizer, 2, 4)
        later = full_state(case, chunk, optimizer)
        then = expected(folder, name)
        mains = {key for key in later if key.startswith("optimizer.state.") and "param." in key}
        moved = [{key: s[key] for key in mains} for s in (then["state"], then["later"], later)]
        same = differences(regrouped(then["state"]), regrouped(state))
        results[name] = same, too_far(name, *moved)
        assert len(mains) > 10
        forget_megatron()
    return results if not distributed.is_initialized() or distributed.get_rank() == 0 else {}


@pytest.mark.parametrize(
    ("world", "names"),
    [(4, AT_THE_SAME_LAYOUT), pytest.param(1, AT_ONE_RANK, marks=pytest.mark.long)],
)
def test_states_of_megatrons_models(archives: str, world: int, names: tuple[str, ...]) -> None:
    results = run_ranks(world, of_megatron, archives, names, world == 1, timeout=300)[0]
    assert results == dict.fromkeys(names, ([], []))


@eager
def of_fsdp2(folder: str, layout: str) -> dict[str, tuple[Any, Any]]:
    results = {}
    for name, settings in FSDP2.items():
        then = expected(folder, name)
        model = make_model(layout)
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(shard(then["weights"][key], param))
        optimizer = build_optimizer(model, settings)
        loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.load(loaded, checkpoint_id=f"{folder}/{name}", no_dist=layout == "plain")
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        saved = get_optimizer_state_dict(model, optimizer)
        state = {
            f"{param}.{key}": whole(value) if isinstance(value, torch.Tensor) else value
            for param, entries in saved["state"].items()
            for key, value in entries.items()
        }
        for step in (2, 3):
            set_gradients(model, step)
            optimizer.step()
        wrong = differences(then["state"], state)
        results[name] = wrong, too_far(name, then["weights"], then["later"], weights(model))
    return results


@pytest.mark.parametrize(("world", "layout"), [(4, "fsdp_tp"), (1, "plain")])
def test_states_of_fsdp2(archives: str, world: int, layout: str) -> None:
    for results in run_ranks(world, of_fsdp2, archives, layout, cpu=False, timeout=300):
        assert results == dict.fromkeys(FSDP2, ([], []))
