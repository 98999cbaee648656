"""What flags ask for is replaced, and nothing else of the trainer's checkpoints."""

import argparse
import sys
from typing import Any

from megatron_eopt import megatron_lm
from tests.harness import run_ranks

MODULES = (
    "megatron.training.checkpointing",
    "megatron.training.training",
    "megatron.core.dist_checkpointing.serialization",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
)
ALWAYS = {
    "load_checkpoint",
    "_load_base_checkpoint",
    "_get_checkpoint_format",
    "_load_global_dist_base_checkpoint",
    "handle_swiglu_in_state_dict",
    # of the trainer
    "LayerWiseDistributedOptimizer",
    "clip_qk",
    "get_megatron_ddp_config",
    "get_megatron_optimizer",
    "get_megatron_optimizer_config",
    "training_log",
    "wrap_model_chunks_with_ddp",
}
STATS = {"train_step"}


def bound() -> dict[tuple[str, str], int]:
    """Return what every name of the modules of checkpoints is bound to."""
    return {
        (module, name): id(value)
        for module in MODULES
        for name, value in vars(sys.modules[module]).items()
    }


def _replaced(commands: list[list[str]], parsed_before: bool) -> list[set[str]]:
    """Return which names differ from upstream's while installed, after each command line."""
    import megatron.training.training as training
    from megatron.training import arguments

    before, found = bound(), []
    known = arguments.parse_args

    def changed() -> set[str]:
        now = bound()
        return {name for place in before for name in place[1:] if now[place] != before[place]}

    def parse(argv: list[str]) -> Any:
        kept, sys.argv = sys.argv, ["script", *argv, "--lr", "1e-3"]
        try:
            if parsed_before:
                return known(megatron_lm.add_arguments)
            return arguments.parse_args()
        finally:
            sys.argv = kept

    with megatron_lm.installed():
        found.append(changed())
        for argv in commands:
            args = parse(argv)
            if parsed_before:
                assert changed() == found[-1]
                _build(training, args)
            found.append(changed())
    assert bound() == before
    return found


def _build(training: Any, args: argparse.Namespace) -> None:
    for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq"):
        delattr(args, f"{name}_dtype")  # the trainer's argument check turns these into dtypes
    training.get_megatron_optimizer_config(args)


COMMANDS = [[], ["--log-optimizer-stats"], []]
EXPECTED = [ALWAYS, ALWAYS, ALWAYS | STATS, ALWAYS]


def test_flags_decide_what_is_replaced():
    assert run_ranks(1, _replaced, COMMANDS, False) == [EXPECTED]


def test_arguments_that_were_parsed_before_are_followed_too():
    assert run_ranks(1, _replaced, COMMANDS, True) == [EXPECTED]
