"""A rank of a large job that is run here does what its dry run counted, exactly."""

import json
from collections import Counter
from dataclasses import asdict, replace
from fractions import Fraction
from typing import Any

import pytest
import torch.distributed as dist

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.tools.plan.model import Layout
from megatron_eopt.tools.recipe import NAMES, recipe
from megatron_eopt.tools.replay import Replayed, figures, replay, scaled
from tests.harness import run_ranks
from tests.unit.test_command import SMALL, printed

SCALE = Fraction(1, 64)


def replayed(name: str, layout: Layout | None, rank: int, changes: Any, optimizer: Any) -> Any:
    if dist.is_initialized():
        dist.destroy_process_group()
    one = recipe(name)
    config = EmergingOptimizerConfig(
        lr=1e-3, bf16=True, use_distributed_optimizer=True, **(one.optimizer_settings | optimizer)
    )
    model = scaled(one.architecture(**changes), SCALE)
    done = replay(model, layout or one.planned(), config, rank)
    broken = []
    for part in ("phases", "collectives", "host_reads", "elements"):
        wrong: Any = Counter(getattr(done.expected, part))
        if part == "phases":
            phase, amount = next(iter(done.expected.phases.items()))
            wrong = {**done.expected.phases, phase: replace(amount, bytes=amount.bytes + 1)}
        else:
            wrong["something"] += 1
        broken.append(replace(done, expected=replace(done.expected, **{part: wrong})).agrees)
    return summary(done), broken


def summary(done: Replayed) -> dict[str, Any]:
    """Return plain values: reports hold process groups, which are of their process."""
    return {
        "agrees": done.agrees,
        "figures": [str(each) for each in (figures(done.report), figures(done.expected))],
        "memory": [asdict(each.memory) for each in (done.report, done.expected)],
        "parts": dict(done.parts),
        "step": done.step,
    }


def check(found: dict[str, Any]) -> None:
    assert found["agrees"], "\n".join(found["figures"])
    real, dry = found["memory"]
    for kind, size in real.items():
        assert size == pytest.approx(dry[kind], rel=0.02), kind
    assert found["step"] > 0
    assert found["parts"]["products"] > 0


MOE = {"num_layers": 2, "num_experts": 8, "moe_layer_freq": [0, 1]}
CASES = {
    "dense": ("llama-3-8b", Layout(tensor=2, data=4), 3, {"num_layers": 2}, {}),
    "experts": ("kimi-k2", Layout(pipeline=2, data=4, expert=4), 5, MOE, {}),
    "adam": ("llama-3-8b", Layout(data=4), 1, {"num_layers": 1}, {"optimizer": "adam"}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_replayed_step_is_the_one_that_was_counted(name):
    found, broken = run_ranks(1, replayed, *CASES[name], cpu=False, timeout=300)[0]
    if name == "adam":
        found["parts"]["products"] = 1.0
    check(found)
    assert not any(broken), "a wrong count is not noticed"


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_can_be_replayed(name):
    found, _ = run_ranks(1, replayed, name, None, 0, {}, {}, cpu=False, timeout=900)[0]
    check(found)


def test_the_command_shows_both():
    words = ["replay", *SMALL, "--dp", "4", "--rank", "2"]
    data, shown = run_ranks(1, printed, [*words, "--json"], words, cpu=False, timeout=200)[0]
    found = json.loads(data[1])
    assert found["counts_agree"] is True
    assert found["rank"] == 2
    assert 0 < found["planned_share"] < found["share_of_iteration"]
    assert "are those of the plan" in " ".join(shown[1].split())


def test_scales_that_do_not_fit_are_refused():
    model = recipe("llama-3-8b").architecture()
    for scale, words in {"1/50": "square", "2/8": "", "1/1000000": "hidden_size"}.items():
        if words:
            with pytest.raises(ConfigurationError, match=words):
                scaled(model, Fraction(scale))
    assert scaled(model, SCALE).fields["hidden_size"] == 512
