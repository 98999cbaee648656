"""What one rank refuses while the optimizer is built, saved or loaded, all ranks refuse alike."""

import pkgutil
from functools import partial
from typing import Any
from unittest import mock

import pytest
from megatron.core import dist_checkpointing
from torch import distributed

from megatron_eopt import ConfigurationError
from megatron_eopt.qk_clip.attention import attentions
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage import runs
from tests.unit.storage.full_state import Case, build, sharded, steps

CASES = {"sharded": Case(), "replicated": Case(**runs.REPLICATED, parallel={"pp": 2})}

# where a rank may find something that the others do not have
BUILDING = [
    "megatron_eopt.wrappers.factory.resolve",
    "megatron_eopt.routing.model.route_all",
    "megatron_eopt.storage.shard.ParamShard.__post_init__",
]
OF_REPLICATED = ["megatron_eopt.wrappers.replicated.optimizer_specs"]
OF_SHARDED = [
    "megatron_eopt.wrappers.factory.optimizer_specs",
    "megatron_eopt.wrappers.zero1.build.fragment_of",
]


def failing_on_rank_1(place: str) -> Any:
    """Let a function raise on rank 1, on the others it does what it did."""
    before = pkgutil.resolve_name(place)

    def failing(*args: Any, **kwargs: Any) -> Any:
        if distributed.get_rank() == 1:
            raise ConfigurationError("injected", place, "must not be so", "Do not inject")
        return before(*args, **kwargs)

    return mock.patch(place, failing)


def caught(action: Any) -> str:
    with pytest.raises(ConfigurationError) as error:
        action()
    distributed.barrier()
    return str(error.value)


def building(case: Case, places: list[str]) -> list[str]:
    found = []
    for place in places:
        with failing_on_rank_1(place):
            found.append(caught(lambda: build(case)))
    return found


def check(results: list[Any], places: list[str]) -> None:
    first, second = results
    assert first == second
    for place, message in zip(places, first, strict=True):
        assert message.startswith(f"injected='{place}'")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_while_it_is_built(name):
    places = BUILDING + (OF_REPLICATED if name == "replicated" else OF_SHARDED)
    check(run_ranks(2, building, CASES[name], places, timeout=90), places)


def frozen_on_the_first_stage() -> str:
    model = {**runs.DENSE, "untied": False}
    # the copy on the last stage is output_layer.weight
    case = Case("muon", model, {"pp": 2}, frozen="word_embeddings")
    return caught(lambda: build(case))


def test_an_embedding_that_is_frozen_on_one_stage_alone():
    first, second = run_ranks(2, frozen_on_the_first_stage)
    assert first == second
    assert "'adam {} and frozen': pipeline stages" in first


SAVING = "megatron_eopt.checkpoint.requests.StateRequests.__init__"
LOADING = [
    "megatron_eopt.checkpoint.requests.StateRequests.write_loaded",
    "megatron_eopt.checkpoint.optimizer_state.continue_groups",
]


def saving_and_loading(case: Case, folder: str) -> list[str]:
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    found = []
    with failing_on_rank_1(SAVING):
        found.append(caught(lambda: sharded(case, chunk, optimizer, is_loading=False)))
    dist_checkpointing.save(sharded(case, chunk, optimizer, is_loading=False), folder)
    wanted = sharded(case, chunk, optimizer, is_loading=True)
    wanted = dist_checkpointing.load(wanted, folder)["optimizer"]
    for place in LOADING:
        with failing_on_rank_1(place):
            found.append(caught(lambda: optimizer.load_state_dict(wanted)))
    return found


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", CASES)
def test_while_state_is_saved_and_loaded(name, tmp_path):
    results = run_ranks(2, saving_and_loading, CASES[name], str(tmp_path), timeout=90)
    check(results, [SAVING, *LOADING])


WORDS = {"muon_hyperball": "non-zero norm", "sinkhorn_muon": "negative values"}


def spoiled(optimizer: str, chunk: Any) -> None:
    """Give one matrix of the last of four layers, in the second pipeline stage, bad weights."""
    for param in chunk.parameters():
        if param.dim() == 2:
            param.data.fill_(1 / min(param.shape))
    for attention in (a for a in attentions(chunk) if a.layer_number == 4):
        attention.linear_proj.weight.data.mul_(0 if optimizer == "muon_hyperball" else -1)


def refused(sharded: bool) -> list[str]:
    storage = {"use_distributed_optimizer": sharded}
    config = storage | {"muon_split_qkv": False}
    messages = []
    for optimizer, words in WORDS.items():
        case = Case(optimizer, {"layers": 4, "heads": 4}, {"pp": 2}, ddp=storage, config=config)
        with pytest.raises(ConfigurationError, match=words) as error:
            build(case, partial(spoiled, optimizer))
        messages.append(str(error.value))
        forget_megatron()
    return messages


@pytest.mark.parametrize("sharded", [True, False])
def test_all_ranks_refuse_the_weights_of_one(sharded):
    first, second = run_ranks(2, refused, sharded)
    assert first == second
    assert all("linear_proj.weight" in words for words in first) or not sharded
