"""What of the trainer's functions has to run differently for our optimizers."""

import argparse
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

from megatron.core.distributed import DistributedDataParallel

from megatron_eopt import cpu
from megatron_eopt.arguments import add_arguments as _extend_parser
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STANDARD_OPTIMIZERS
from megatron_eopt.base.wrapping import Function, around

ProviderT = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to the trainer's parser and return it: an ``extra_args_provider``.

    On the CPU back end, flags that were not given get defaults that work there.
    """
    if cpu.is_enabled():
        cpu.set_defaults(parser)
    return _extended(parser)


def _extended(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags, and let ``--help`` print texts with a percent sign that is no format.

    megatron-core 0.19.2 has one, at ``--moe-paged-stash-buffer-size-factor-cuda``.
    """
    for action in _extend_parser(parser)._actions:
        if action.help is None or action.help is argparse.SUPPRESS:
            continue
        try:
            action.help % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")
    return parser


@around
def with_our_flags(
    original: Function,
    extra_args_provider: ProviderT | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """Let the trainer's parser know our flags, whatever else a script adds to it.

    A script that does not know us expects Megatron's values of flags that are not given, so these
    are the defaults then. On the CPU back end, what was parsed is checked for what needs a GPU.
    """

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if cpu.is_enabled():
            cpu.set_defaults(parser)  # before those of the script
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        knows_us = any(action.dest == "optimizer_defaults" for action in parser._actions)
        _extended(parser)
        if not knows_us:
            parser.set_defaults(optimizer_defaults="megatron")
        return parser

    args: argparse.Namespace = original(provider, ignore_unknown_args)
    if cpu.is_enabled():
        cpu.check_supported(args)
    return args


@around
def checking_what_it_knows(
    original: Function, args: argparse.Namespace, defaults: Any = None
) -> Any:
    """Let Megatron check flags without those that it refuses and we serve.

    It refuses ``--use-torch-fsdp2`` and ``--use-megatron-fsdp`` with any optimizer but its own,
    off-loading without the Adam that does it there, and the flags of QK-clip without Transformer
    Engine's attention, where we record the logits of the local one. Whatever else it requires of
    either FSDP is checked as for Adam.
    """
    pretended: dict[str, Any] = {}
    is_ours = args.optimizer not in STANDARD_OPTIMIZERS
    if getattr(args, "use_megatron_fsdp", False):
        _check_megatron_fsdp(args)
        pretended |= {"optimizer": "adam"} if is_ours else {}
    if getattr(args, "use_torch_fsdp2", False):
        (_check_torch_fsdp2 if is_ours else _check_saving)(args)
        pretended |= {"optimizer": "adam"} if is_ours else {}
    if is_ours:
        _check_persistent_worker(args)
        pretended["optimizer_cpu_offload"] = False
    if args.transformer_impl == "local":
        pretended |= {"qk_clip": False, "log_max_attention_logit": False}
    asked = {name: getattr(args, name) for name in pretended}
    vars(args).update(pretended)
    try:
        return original(args, {} if defaults is None else defaults)
    finally:
        vars(args).update(asked)


def _check_persistent_worker(args: argparse.Namespace) -> None:
    """Raise if a process that lives on would write state that training goes on to change.

    It is handed tensors of the host by their memory, and only those of a GPU are copied.
    """
    persistent = getattr(args, "use_persistent_ckpt_worker", False)
    # on a CPU everything is copied
    on_gpu = not cpu.is_enabled()
    if on_gpu and args.optimizer_cpu_offload and getattr(args, "async_save", False) and persistent:
        rule = "would write off-loaded state while training changes it (--async-save)"
        way_out = "Leave out --async-save, and save synchronously"
        raise ConfigurationError("--use-persistent-ckpt-worker", True, rule, way_out)


def _check_torch_fsdp2(args: argparse.Namespace) -> None:
    def refuse(dest: str, rule: str, way_out: str) -> NoReturn:
        flag = f"--{dest.replace('_', '-')}"
        raise ConfigurationError(flag, getattr(args, dest), f"{rule} (--use-torch-fsdp2)", way_out)

    name = args.optimizer
    if name.startswith("dist_"):
        rule = "cuts Megatron's buffers, and torch FSDP2 cuts state already"
        refuse("optimizer", rule, f"Pass --optimizer {name.removeprefix('dist_')}")
    if args.ckpt_format != "torch_dist":
        rule = f"does not hold the state of {name}"
        refuse("ckpt_format", rule, "Pass --ckpt-format torch_dist")
    if args.tensor_model_parallel_size > 1:
        rule = "Megatron's mesh has no dimension for tensor-parallel ranks"
        way_out = "Pass 1, or use --use-distributed-optimizer"
        refuse("tensor_model_parallel_size", rule, way_out)
    if args.calculate_per_token_loss:
        rule = "Megatron does not divide gradients of torch FSDP2 by the number of tokens"
        refuse("calculate_per_token_loss", rule, "Leave the flag out")


def _check_saving(args: argparse.Namespace) -> None:
    """Raise if Megatron's own optimizer of DTensors would fail at the first save, hours later."""
    if args.save and args.ckpt_format == "torch_dist" and not args.no_save_optim:
        rule = f"has no form for the state that Megatron's {args.optimizer} keeps of DTensors"
        way_out = "Pass --ckpt-format torch_dcp or --no-save-optim, or train with another optimizer"
        rule += " (--use-torch-fsdp2)"
        raise ConfigurationError("--ckpt-format", args.ckpt_format, rule, way_out)


def _check_megatron_fsdp(args: argparse.Namespace) -> None:
    name = args.optimizer
    if name.startswith("dist_"):
        rule = "cuts Megatron's buffers, and Megatron-FSDP cuts state already"
        way_out = f"Pass --optimizer {name.removeprefix('dist_')}"
        raise ConfigurationError("--optimizer", name, f"{rule} (--use-megatron-fsdp)", way_out)
    asynchronous = args.async_save and args.use_persistent_ckpt_worker
    if asynchronous and args.async_strategy == "mcore":
        rule = "fails at the first save: Megatron asks of its writer what that cannot do"
        rule += " (--use-megatron-fsdp)"
        way_out = "Leave out --async-save, and save synchronously"
        raise ConfigurationError("--async-strategy", "mcore", rule, way_out)


@around
def sharding_ddp_config(original: Function, args: Any) -> Any:
    """Let Megatron's DDP reduce-scatter gradients for layer-wise optimizers as it does for Adam.

    The trainer's argument check has turned ``use_distributed_optimizer`` off for them.
    """
    ddp_config = original(args)
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        ddp_config = dataclasses.replace(ddp_config, use_distributed_optimizer=True)
    return ddp_config


@around
def in_the_usual_layout(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Lay parameters out in one buffer without padding, whatever the optimizer.

    Where a caller asks for layer-wise storage gradients are reduce-scattered, as Megatron's own
    function promises: it turns that on in the configuration that it is given.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    wanted = call.arguments
    # the next release's function is asked for a wrapper by flags, and for no layout
    is_fsdp = wanted.get("use_megatron_fsdp") or wanted.get("use_torch_fsdp2")
    is_ddp = wanted.get("DP", DistributedDataParallel) is DistributedDataParallel and not is_fsdp
    layer_wise = wanted["use_layer_wise_distributed_optimizer"]
    if layer_wise and is_ddp and wanted.get("use_layer_wise_param_layout", True):
        # gradients are scattered where the layout that we do without goes with it
        wanted["ddp_config"].use_distributed_optimizer = True
    wanted["use_layer_wise_distributed_optimizer"] = False
    return original(*call.args, **call.kwargs)
