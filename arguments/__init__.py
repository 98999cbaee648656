"""Command line of the optimizer layer, installed as ``megatron_eopt.arguments``.

:func:`add_arguments` extends the trainer's parser (it is an ``extra_args_provider``), and
:func:`config_from_args` turns the parsed flags into the configuration that the trainer's optimizer
is built from.
"""

from megatron_eopt.arguments.parser import add_arguments, config_from_args

__all__ = ["add_arguments", "config_from_args"]
