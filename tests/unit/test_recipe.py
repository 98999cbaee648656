"""Recipes have the published sizes, and each of their flags has a source or a reason."""

import pytest
import torch.distributed as dist

from megatron_eopt.dry_run import dry_world
from megatron_eopt.plan.architectures import Architecture
from megatron_eopt.plan.model import Layout, build_stage, stage_kinds
from megatron_eopt.recipe import NAMES, recipe
from tests.harness import run_ranks

WHOLE = [name for name in NAMES if recipe(name).base is None]


def elements(shape: Architecture) -> int:
    """Return the number of parameters: stages of one layer, and of experts every 32nd."""
    share = 32 if any(shape.moe_layers) else 1
    layout = Layout(pipeline=shape.fields["num_layers"], data=share, expert=share)
    found = 0
    for kind in stage_kinds(shape, layout):
        with dry_world(layout.first_rank(kind[0]), layout.world_size):
            for param in build_stage(shape, layout).parameters():
                alike = 1 if getattr(param, "allreduce", True) else share
                found += len(kind) * alike * param.numel()
    return found


def counted() -> dict[str, int]:
    dist.destroy_process_group()
    return {name: elements(recipe(name).architecture()) for name in NAMES}


def test_sizes_are_the_published_ones():
    (found,) = run_ranks(1, counted, cpu=False)
    assert found == {name: pytest.approx(recipe(name).parameters, rel=0.02) for name in NAMES}


@pytest.mark.parametrize("name", WHOLE)
def test_every_flag_has_one_source_or_reason(name):
    one = recipe(name)
    assert all(group["at"].partition(",")[0] in one.sources for group in one.published)
    assert all(group["why"] for group in (*one.ours, one.layout))
    flags = [flag for group in (*one.published, *one.ours) for flag in group["flags"]]
    assert len(flags) == len(set(flags))
    assert set(one.small) <= set(flags)


@pytest.mark.parametrize("name", WHOLE)
def test_small_models_are_of_the_same_kind(name):
    one = recipe(name)
    flags, small = set(one.words()), set(one.words(small=True))
    left_out = {word for word in flags - small if word.startswith("--") and "lr-" not in word}
    layout = {f"--{flag}" for flag in one.layout["flags"]}
    assert left_out == layout - {"--data-parallel-size"}
