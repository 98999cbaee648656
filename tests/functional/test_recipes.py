"""Recipes have the published sizes, pass Megatron's checks, and train at a small size."""

import os
import sys
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_eopt import megatron_lm
from megatron_eopt.tools.dry_run import dry_world
from megatron_eopt.tools.plan.architectures import Architecture
from megatron_eopt.tools.plan.model import ParallelLayout, build_stage, stage_kinds
from megatron_eopt.tools.recipe import NAMES, recipe
from tests.functional.script import _run_once, numbers, run_here
from tests.functional.test_qk_clip import logged
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long

WHOLE = [name for name in NAMES if recipe(name).base is None]


def elements(shape: Architecture) -> int:
    """Return the number of parameters, from stages of one layer with every 32nd expert."""
    share = 32 if any(shape.moe_layers) else 1
    layout = ParallelLayout(pipeline=shape.fields["num_layers"], data=share, expert=share)
    found = 0
    for kind in stage_kinds(shape, layout):
        with dry_world(layout.first_rank(kind[0]), layout.world_size):
            for param in build_stage(shape, layout).parameters():
                alike = 1 if getattr(param, "allreduce", True) else share
                found += len(kind) * alike * param.numel()
    return found


@pytest.mark.long
@on_ranks(1, cpu=False)
def test_sizes_are_the_published_ones():
    dist.destroy_process_group()
    for name in NAMES:
        found = elements(recipe(name).architecture())
        assert found == pytest.approx(recipe(name).parameters, rel=0.02), name


@pytest.mark.parametrize("name", WHOLE)
def test_every_flag_has_one_source_or_reason(name):
    one = recipe(name)
    assert all(group["at"].partition(",")[0] in one.sources for group in one.published)
    flags = [flag for group in (*one.published, *one.ours) for flag in group["flags"]]
    assert len(flags) == len(set(flags))
    # the small model is of the same kind
    words = {word[2:] for word in one.words(small=True)}
    left_out = set(flags) - words - {word.removeprefix("no-") for word in words}
    assert all(flag.startswith("lr-") for flag in left_out)
    assert set(one.small) <= set(flags)


def print_checked(words: list[str], ranks: int) -> None:
    """Print what Megatron makes of a recipe on so many ranks."""
    from megatron.training import argument_utils, arguments

    # its length is left to the user where batches were not published
    sys.argv[:] = ["recipe", "--train-iters", "10", *words]
    with mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)), megatron_lm.installed():
        args = arguments.validate_args(arguments.parse_args(megatron_lm.add_arguments))
        args.padded_vocab_size = args.vocab_size
        layers = argument_utils.gpt_config_from_args(args).transformer.num_layers
        sys.stdout.write(f"{args.optimizer} {layers} {args.data_parallel_size}")


@pytest.mark.parametrize("name", NAMES)
def test_megatron_takes_every_flag(name):
    layout, layers = recipe(name).planned(), recipe(name).architecture().fields["num_layers"]
    (text,) = run_ranks(1, run_here, print_checked, recipe(name).words(), layout.world_size)
    assert text.splitlines()[-1] == f"muon {layers} {layout.data}"


def trained(name: str, flags: str, ranks: int = 1) -> list[float]:
    """Return the losses of a recipe's small model."""
    words = [*recipe(name).words(small=True), *flags.split()]
    return numbers("".join(run_ranks(ranks, _run_once, words, timeout=240, cpu=False)))


CHANGES = {
    "llama-3-8b": "--tensor-model-parallel-size 2",
    "glm-4.5": "--expert-model-parallel-size 2",
    "qwen3-8b": "--optimizer adam",
}


@pytest.mark.parametrize("name", mostly_long(WHOLE, "kimi-k2", "glm-4.5", "llama-3-8b"))
def test_small_models_train(name):
    flags = CHANGES.get(name, "")
    found = trained(name, flags, ranks=2 if "parallel" in flags else 1)
    assert len(found) == 10
    assert found[-1] < (0.9 if "adam" in flags else 0.6) * found[0]


@pytest.mark.long
def test_qk_clip_of_the_recipe_acts(tmp_path):
    flags = "--log-max-attention-logit --qk-clip-threshold {0} --tensorboard-dir {1}/{0}"
    for threshold in (100, 0.01):
        trained("kimi-k2", flags.format(threshold, tmp_path))
    assert logged(tmp_path / "0.01")[-1] < 0.03 < 0.1 < logged(tmp_path / "100")[-1]
