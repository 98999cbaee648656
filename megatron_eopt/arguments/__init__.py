"""Command-line flags of the optimizers, installed as ``megatron_eopt.arguments``.

:func:`add_arguments` adds them to the trainer's parser as an ``extra_args_provider``, and
:func:`config_from_args` turns the parsed flags into the optimizer's configuration.
A flag is a field of the configuration, so whoever changes flags reads only ``config``.
"""

from megatron_eopt.arguments.parser import add_arguments, config_from_args

__all__ = ["add_arguments", "config_from_args"]
