"""Wrappers around the trainer's functions for flags, their checks and the DDP configuration."""

import argparse
import dataclasses
import functools
import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NoReturn

from megatron.core import datasets
from megatron.core.distributed import DistributedDataParallel

from megatron_eopt.arguments import add_arguments as _extend_parser
from megatron_eopt.base import gpu
from megatron_eopt.base.errors import ConfigurationError, did_you_mean
from megatron_eopt.base.names import STANDARD_OPTIMIZERS
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.checkpoint.local_state import refuse_rank_files

ProviderT = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]


@contextmanager
def _of_all_ranks() -> Iterator[None]:
    """In a block, mark configuration errors as those of all ranks, which have the same flags."""
    try:
        yield
    except ConfigurationError as error:
        error.is_on_all_ranks = True
        raise


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the optimizer flags to the trainer's parser and return it: an ``extra_args_provider``.

    On the CPU back end, flags get defaults that work there.
    """
    if gpu.stand_in is not None:
        gpu.stand_in.set_defaults(parser)
    return _extended(parser)


def _extended(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags, and let errors name similar ones in place of printing all.

    Percent signs in help texts, which would make ``--help`` fail, are escaped: megatron-core 0.19.2
    has one in ``--moe-paged-stash-buffer-size-factor-cuda``.
    """
    for action in _extend_parser(parser)._actions:
        if action.help is None or action.help is argparse.SUPPRESS:
            continue
        try:
            action.help % {**vars(action), "prog": parser.prog}
        except (KeyError, TypeError, ValueError):
            action.help = action.help.replace("%", "%%")
    parser.error = functools.partial(_refuse_flags, parser)  # type: ignore[method-assign,assignment]
    return parser


_UNKNOWN = re.compile(r"unrecognized arguments: (--[\w-]+)|ambiguous option: (--[\w-]+)")
_CHOICE = re.compile(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", re.DOTALL)


def _refuse_flags(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End the process as argparse does, but with similar names in place of hundreds of flags."""
    hint = f"{parser.prog} --help lists all flags"
    if (match := _UNKNOWN.search(message)) is not None:
        flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
        hint = did_you_mean(match[1] or match[2], flags, hint, shown=str)
    elif (match := _CHOICE.match(message)) is not None:
        names = [name.strip("' ") for name in match[3].split(",")]
        message = f"argument {match[1]}: {match[2]!r} is not one of its values"
        hint = did_you_mean(match[2], names, f"Choose one of {', '.join(names)}", shown=str)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(f"{parser.prog}: error: {message}. {hint}\n")
    raise SystemExit(2)


@around
def with_our_flags(
    original: Function,
    extra_args_provider: ProviderT | None = None,
    ignore_unknown_args: bool = False,
) -> argparse.Namespace:
    """Parse with our flags in addition to those that a script adds.

    If the script does not add our flags itself, ``--optimizer-defaults`` is ``megatron``. On the
    CPU back end, flags that need a GPU raise an error.
    """

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if gpu.stand_in is not None:
            gpu.stand_in.set_defaults(
                parser
            )  # first, so that the script's defaults take precedence
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        # a script that adds our flags was written for our defaults, and others for Megatron's
        knows_us = any(action.dest == "optimizer_defaults" for action in parser._actions)
        _extended(parser)
        if not knows_us:
            parser.set_defaults(optimizer_defaults="megatron")
        return parser

    with _of_all_ranks():
        args: argparse.Namespace = original(provider, ignore_unknown_args)
        if gpu.stand_in is not None:
            gpu.stand_in.check_supported(args)
    return args


@around
def validating_known_flags(
    original: Function, args: argparse.Namespace, defaults: Any = None
) -> Any:
    """Hide flags from Megatron's check that it does not support but this package does.

    These are both FSDPs and off-loading with optimizers other than Adam and SGD (FSDP is checked as
    for Adam), and QK-clip with local attention, whose logits we record.
    """
    with _of_all_ranks():
        _check_flags(args)
    pretended: dict[str, Any] = {}
    is_ours = args.optimizer not in STANDARD_OPTIMIZERS
    is_fsdp = getattr(args, "use_megatron_fsdp", False) or getattr(args, "use_torch_fsdp2", False)
    if is_ours:
        pretended |= {"optimizer": "adam"} if is_fsdp else {}
        # megatron-core's off-loading needs the precision-aware Adam, which the check demands; this
        # package's own does not
        pretended["optimizer_cpu_offload"] = False
    if args.transformer_impl == "local":
        pretended |= {"qk_clip": False, "log_max_attention_logit": False}
    asked = {name: getattr(args, name) for name in pretended}
    vars(args).update(pretended)
    try:
        return original(args, {} if defaults is None else defaults)
    finally:
        # also after an error, which a caller may catch
        vars(args).update(asked)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise an error for flags that contradict each other, or would fail much later."""
    _check_helpers(Path(inspect.getfile(datasets)).parent)
    if getattr(args, "fp16", False) and getattr(args, "bf16", False):
        rule, hint = "cannot be combined with --bf16", "Leave out one of them"
        raise ConfigurationError("--fp16", True, rule, hint)
    is_ours = args.optimizer not in STANDARD_OPTIMIZERS
    if getattr(args, "use_megatron_fsdp", False):
        _check_megatron_fsdp(args)
    if getattr(args, "use_torch_fsdp2", False):
        (_check_torch_fsdp2 if is_ours else _check_saving)(args)
    if is_ours:
        _check_persistent_worker(args)
        if getattr(args, "ckpt_format", None) == "torch" and is_sharded(args):
            raise refuse_rank_files("--ckpt-format", "torch")


def _check_helpers(folder: Path) -> None:
    """Raise an error before the start if a checkout could not compile its helpers of datasets.

    The trainer would say so after all its flags, and end its processes without a reason.
    """
    compiled = (folder / f"helpers_cpp{suffix}" for suffix in EXTENSION_SUFFIXES)
    if not (folder / "Makefile").exists() or any(path.exists() for path in compiled):
        return
    needed = ("make", os.environ.get("CXX", "g++"), "python3")
    missing = [name for name in needed if shutil.which(name) is None]
    asked = ["python3", "-m", "pybind11", "--includes"]
    if "python3" not in missing and subprocess.run(asked, capture_output=True).returncode:
        missing.append("pybind11")
    if missing:
        rule = f"compiles a part of megatron at its first start, for which {missing} is missing"
        hint = "Install it: pip install pybind11 for the package, your system's for the tools"
        raise ConfigurationError("Megatron-LM", str(folder), rule, hint)


def _check_persistent_worker(args: argparse.Namespace) -> None:
    """Raise an error if a persistent checkpoint worker would save off-loaded state.

    The worker copies GPU tensors only; training would change CPU tensors while it writes them.
    """
    persistent = getattr(args, "use_persistent_ckpt_worker", False)
    # the CPU back end copies everything
    on_gpu = gpu.stand_in is None
    if on_gpu and args.optimizer_cpu_offload and getattr(args, "async_save", False) and persistent:
        rule = "would write off-loaded state while training changes it (--async-save)"
        hint = "Leave out --async-save to save synchronously"
        raise ConfigurationError("--use-persistent-ckpt-worker", True, rule, hint)


def _check_torch_fsdp2(args: argparse.Namespace) -> None:
    def refuse(dest: str, rule: str, hint: str) -> NoReturn:
        flag = f"--{dest.replace('_', '-')}"
        raise ConfigurationError(flag, getattr(args, dest), f"{rule} (--use-torch-fsdp2)", hint)

    name = args.optimizer
    if name.startswith("dist_"):
        rule = "shards Megatron's buffers, but torch FSDP2 already shards the state"
        refuse("optimizer", rule, f"Pass --optimizer {name.removeprefix('dist_')}")
    if args.ckpt_format != "torch_dist":
        rule = f"cannot store the state of {name}"
        refuse("ckpt_format", rule, "Pass --ckpt-format torch_dist")
    if args.tensor_model_parallel_size > 1:
        rule = "Megatron's mesh has no dimension for tensor-parallel ranks"
        hint = "Pass 1, or use --use-distributed-optimizer instead"
        refuse("tensor_model_parallel_size", rule, hint)
    if args.calculate_per_token_loss:
        rule = "Megatron does not divide gradients of torch FSDP2 by the number of tokens"
        refuse("calculate_per_token_loss", rule, "Leave the flag out")


def _check_saving(args: argparse.Namespace) -> None:
    """Raise an error if saving Megatron's own FSDP2 optimizer would fail, perhaps hours later."""
    if args.save and args.ckpt_format == "torch_dist" and not args.no_save_optim:
        rule = f"cannot store the state that Megatron's {args.optimizer} keeps for DTensors"
        hint = "Pass --ckpt-format torch_dcp or --no-save-optim, or train with another optimizer"
        rule += " (--use-torch-fsdp2)"
        raise ConfigurationError("--ckpt-format", args.ckpt_format, rule, hint)


def _check_megatron_fsdp(args: argparse.Namespace) -> None:
    name = args.optimizer
    if name.startswith("dist_"):
        rule = "shards Megatron's buffers, but Megatron-FSDP already shards the state"
        hint = f"Pass --optimizer {name.removeprefix('dist_')}"
        raise ConfigurationError("--optimizer", name, f"{rule} (--use-megatron-fsdp)", hint)
    asynchronous = args.async_save and args.use_persistent_ckpt_worker
    if asynchronous and args.async_strategy == "mcore":
        rule = "fails at the first save, in Megatron's own writer (--use-megatron-fsdp)"
        hint = "Leave out --async-save to save synchronously"
        raise ConfigurationError("--async-strategy", "mcore", rule, hint)


def is_sharded(args: Any) -> bool:
    """Return whether flags ask for sharded optimizer state in Megatron's buffers."""
    layer_wise = getattr(args, "use_layer_wise_distributed_optimizer", False)
    return args.use_distributed_optimizer or layer_wise or args.optimizer.startswith("dist_")


@around
def requiring_a_rate(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Raise an error for a missing learning rate before the model is built, not after."""
    from megatron.training import get_args  # late, since only trainers have it

    flags = get_args()
    if flags.lr is None and not flags.skip_train:
        with _of_all_ranks():
            raise ConfigurationError("--lr", None, "training needs a learning rate", "Pass --lr")
    return original(*args, **kwargs)


@around
def sharding_ddp_config(original: Function, args: Any) -> Any:
    """Make Megatron's DDP reduce-scatter gradients for layer-wise optimizers, as for Adam.

    The trainer's argument check has turned ``use_distributed_optimizer`` off for them.
    """
    ddp_config = original(args)
    if getattr(args, "use_layer_wise_distributed_optimizer", False):
        ddp_config = dataclasses.replace(ddp_config, use_distributed_optimizer=True)
    return ddp_config


@around
def with_standard_layout(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Wrap the model with Megatron's usual parameter layout, whatever the optimizer.

    For layer-wise storage this turns reduce-scatter on in the caller's ``ddp_config``, as Megatron
    does.
    """
    call = inspect.signature(original).bind(*args, **kwargs)
    call.apply_defaults()
    wanted = call.arguments
    # megatron-core 0.20 selects the wrapper by flags and has no argument for the layout
    is_fsdp = wanted.get("use_megatron_fsdp") or wanted.get("use_torch_fsdp2")
    is_ddp = wanted.get("DP", DistributedDataParallel) is DistributedDataParallel and not is_fsdp
    layer_wise = wanted["use_layer_wise_distributed_optimizer"]
    if layer_wise and is_ddp and wanted.get("use_layer_wise_param_layout", True):
        # Megatron does this together with its layer-wise layout, which is not used here
        wanted["ddp_config"].use_distributed_optimizer = True
    # with it, Megatron would use buckets whose parameters are not cut
    wanted["use_layer_wise_distributed_optimizer"] = False
    return original(*call.args, **call.kwargs)
