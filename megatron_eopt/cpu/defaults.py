"""Defaults of Megatron's flags that make sense without a GPU."""

import argparse

DEFAULTS: dict[str, object] = {
    "distributed_backend": "gloo",
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "use_cpu_initialization": True,
}
"""Destinations of the trainer's parser and their values here. What can only be had on a GPU is
still an error if it is asked for, see :func:`~megatron_eopt.cpu.check_supported`."""


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """Give the trainer's parser these defaults, for the flags that it knows."""
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{dest: value for dest, value in DEFAULTS.items() if dest in known})
