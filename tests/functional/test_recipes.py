"""Recipes pass Megatron's checks at full size, and train at a small one."""

import os
import sys
from unittest import mock

import pytest

from megatron_eopt import cpu, megatron_lm
from megatron_eopt.recipe import NAMES, recipe
from tests.functional.script import _run_once, losses, run_here
from tests.functional.test_qk_clip import logged
from tests.harness import run_ranks
from tests.unit.test_recipe import WHOLE


def print_checked(words: list[str], ranks: int) -> None:
    """Print what Megatron makes of a recipe on so many ranks."""
    cpu.enable_if_chosen()
    from megatron.training import argument_utils, arguments

    # its length is left to the user where batches were not published
    sys.argv[:] = ["recipe", "--train-iters", "10", *words]
    with mock.patch.dict(os.environ, WORLD_SIZE=str(ranks)), megatron_lm.installed():
        args = arguments.validate_args(arguments.parse_args(megatron_lm.add_arguments))
        args.padded_vocab_size = args.vocab_size
        layers = argument_utils.gpt_config_from_args(args).transformer
        found = (args.data_parallel_size, args.optimizer, layers.num_layers, args.muon_scale_mode)
        sys.stdout.write(" ".join(map(str, found)))


@pytest.mark.parametrize("name", NAMES)
def test_megatron_takes_every_flag(name):
    one = recipe(name)
    layout, fields = one.planned(), one.architecture().fields
    (text,) = run_ranks(1, run_here, print_checked, one.words(), layout.world_size)
    expected = f"{layout.data} muon {fields['num_layers']} adamw_rms"
    assert text.splitlines()[-1] == expected


def trained(name: str, *flags: str, ranks: int = 1) -> list[float]:
    """Return the losses of a recipe's small model."""
    words = [*recipe(name).words(small=True), *flags]
    output = "".join(run_ranks(ranks, _run_once, words, timeout=240, cpu=False))
    return [float(loss) for loss in losses(output)]


@pytest.mark.parametrize("name", WHOLE)
def test_small_models_train(name):
    found = trained(name)
    assert len(found) == 10
    assert found[-1] < 0.6 * found[0]


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama-3-8b", "--tensor-model-parallel-size 2"),
        ("glm-4.5", "--expert-model-parallel-size 2"),
        ("deepseek-v3", "--optimizer adam"),
    ],
)
def test_small_models_train_on_two_ranks(name, flags):
    found = trained(name, *flags.split(), ranks=2)
    assert found[-1] < 0.9 * found[0]


def test_qk_clip_of_the_recipe_acts(tmp_path):
    tops = []
    for threshold in ("100", "0.01"):
        folder = str(tmp_path / threshold)
        log = ["--log-max-attention-logit", "--tensorboard-dir", folder]
        trained("kimi-k2", "--qk-clip-threshold", threshold, *log)
        tops.append(logged(folder)[-1])
    assert tops[1] < 0.03 < 0.1 < tops[0]
