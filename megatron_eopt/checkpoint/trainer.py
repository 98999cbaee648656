"""Wrappers of Megatron-LM's loading functions, which match optimizer state with checkpoints."""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron.core import parallel_state
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.module import Float16Module
from torch import nn

from megatron_eopt.base.agreement import (
    CheckpointError,
    from_rank_0,
    gather_unique,
    is_rank_0,
    raise_together,
)
from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.checkpoint import fsdp_dtensor
from megatron_eopt.checkpoint.catalogue import read_catalogue
from megatron_eopt.checkpoint.common_state import read_common_state
from megatron_eopt.checkpoint.local_state import refuse_rank_files
from megatron_eopt.checkpoint.matching import match
from megatron_eopt.checkpoint.saving import (
    finishing_later,
    replacing_a_folder,
    when_it_is_in_place,
    with_a_copy_of_the_tracker,
    written_to,
)
from megatron_eopt.checkpoint.vocabulary import keeping_padding
from megatron_eopt.guard.contents import (
    METADATA,
    RANK_FILE,
    TRACKER,
    damaged,
    forget_metadata,
    form_of,
    read_tracker,
)
from megatron_eopt.guard.files import check, check_unchanged, is_complete
from megatron_eopt.guard.saves import whole
from megatron_eopt.megatron_core.stored_weights import StoredWeights
from megatron_eopt.megatron_core.upstream import owner_of, require_upstream
from megatron_eopt.routing.groups import GROUP_ID
from megatron_eopt.state.groups import overridden
from megatron_eopt.state.rule import log_lines

logger = logging.getLogger(__name__)

type Rebindings = list[tuple[ModuleType, str, Any]]
"""Which names of Megatron's modules to replace: (module, name, replacement)."""


def trainer_rebindings() -> Rebindings:
    """Return the replacements for the trainer's loading functions.

    The caller must replace an object in every module that imported it.
    """
    wrappers = {
        "load_checkpoint": _checked_load,
        "get_checkpoint_name": _in_the_right_folder,
        "get_checkpoint_tracker_filename": with_a_copy_of_the_tracker,
        "save_checkpoint": replacing_a_folder,
        "on_save_checkpoint_success": when_it_is_in_place,
        "schedule_async_save": finishing_later,
        "_load_global_dist_base_checkpoint": _matching_torch_dist,
        "_load_base_checkpoint": _matching_fsdp_dtensor,
        "_get_checkpoint_format": _taking_the_format,
        "handle_swiglu_in_state_dict": _under_a_wrapper,
        "read_metadata": _at_the_step_asked_for,
        "_maybe_setup_gpt_to_hybrid_load": _refusing_layers_of_gpt,
        "vocab_size_with_padding": keeping_padding,
    }
    return wrapped(wrappers)


def wrapped(wrappers: Mapping[str, Callable[[Function], Function]]) -> Rebindings:
    """Return the rebindings that wrap functions; raises ImportError if a function is missing."""
    return [
        (owner_of(name), name, wrapper(require_upstream(name)))
        for name, wrapper in wrappers.items()
    ]


@around
def _checked_load(
    original: Function,
    ddp_model: Any,
    optimizer: Any,
    opt_param_scheduler: Any,
    load_arg: str = "load",
    *rest: Any,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint that has been checked; all ranks raise the same errors.

    For all formats but ``torch``, the trainer calls ``_load_base_checkpoint`` twice. First, with
    ``rank0=True``, for the arguments and the metadata of the run that wrote the checkpoint. Then
    with the state to fill, which it has built by these, and which it passes to ``load_state_dict``.
    """
    # for torch FSDP2 the trainer skips ``load_state_dict``, since all is loaded in place
    # (``training.py``). That is not so here: counts and kinds of state may be converted
    if getattr(optimizer, "loads_itself", False):
        kwargs["skip_load_to_model_and_opt"] = False
    trainer = owner_of("load_checkpoint")
    args = trainer.get_args()
    folder = getattr(args, load_arg)
    rates = _rates_kept(optimizer, opt_param_scheduler)
    with _reading(args), _loading(optimizer), rates, _at_any_layout(optimizer):
        if folder is not None and _read.get() is not None and not getattr(args, "ckpt_step", None):
            from_rank_0(lambda: _check_tracker(Path(folder)))
        try:
            loaded = original(ddp_model, optimizer, opt_param_scheduler, load_arg, *rest, **kwargs)
            raise_together(_check_read)
        except AssertionError as error:
            # the trainer does not name the flag (optimizer_param_scheduler.py)
            if "class input value" in str(error):
                error.add_note(
                    "Pass --override-opt-param-scheduler to follow the schedule of this run's "
                    "flags, or --use-checkpoint-opt-param-scheduler for that of the checkpoint."
                )
            raise
        except SystemExit as ended:
            # the trainer prints why it cannot go on, and exits with status 0, as if it had
            # succeeded; --exit-on-missing-checkpoint asks for this where there is no checkpoint
            asked = args.exit_on_missing_checkpoint and not trainer.checkpoint_exists(folder)
            if ended.code or asked:
                raise
            rule = "cannot be loaded, for the reason that Megatron has printed above"
            raise damaged(folder, rule) from ended
    if None not in (folder, args.save) and Path(folder) != Path(args.save) and is_rank_0():
        _warn_of_later_checkpoints(Path(args.save), loaded[0])
    return loaded


def _warn_of_later_checkpoints(folder: Path, iteration: int) -> None:
    """Warn if a run begins before the last checkpoint of another folder, to which it saves."""
    try:
        last = read_tracker(folder / TRACKER)
    except (OSError, CheckpointError):
        return
    if last != "release" and last > iteration:
        text = (
            "This run begins at iteration %d, but %s has a checkpoint of iteration %d. The next "
            "save will replace it as the last one. To go on from it, pass --load %s."
        )
        logger.warning(text, iteration, folder, last, folder)


@contextmanager
def _at_any_layout(optimizer: Any) -> Iterator[None]:
    """In a block, let the trainer load a form that :func:`match` reads or refuses.

    Checkpoints of version 0.3 have this form's name, although their state is by parameter.
    """
    forms = DistributedOptimizer.checkpoint_fully_reshardable_formats
    by_bucket = {"dp_reshardable"} if _storages_of(optimizer) else set()
    DistributedOptimizer.checkpoint_fully_reshardable_formats = forms | by_bucket
    try:
        yield
    finally:
        DistributedOptimizer.checkpoint_fully_reshardable_formats = forms


@around
def _refusing_layers_of_gpt(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Refuse optimizer state of a GPTModel for a HybridModel, which has other layers."""
    layers, loads_state = original(*values, **kwargs)
    if loads_state and _storages_of(_optimizer.get()):
        rule = "is of a GPTModel, whose optimizer state does not load into a HybridModel"
        hint = "Load only the weights (--no-load-optim)"
        raise CheckpointError("checkpoint", "optimizer state", rule, hint)
    return layers, loads_state


def _storages_of(optimizer: Any) -> list[StoredWeights]:
    """Return the members of a chain of this package; none of megatron-core's own optimizers."""
    members = getattr(optimizer, "chained_optimizers", ())
    return [member for member in members if isinstance(member, StoredWeights)]


@dataclass
class _Read:
    """A load in progress."""

    args: Any  # the trainer's arguments
    # folders whose files have been checked, and the identities of their saves
    checked: dict[Path, object] = field(default_factory=dict)


_read: ContextVar[_Read | None] = ContextVar("_read", default=None)

_optimizer: ContextVar[Any] = ContextVar("_optimizer", default=None)
"""The optimizer of the load in progress."""


@contextmanager
def _reading(args: Any) -> Iterator[None]:
    """In a block, read only complete checkpoints of file systems; a block inside has no effect."""
    if _read.get() is not None or MultiStorageClientFeature.is_enabled():
        yield
        return
    token = _read.set(_Read(args))
    try:
        yield
    finally:
        _read.reset(token)


@around
def _in_the_right_folder(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Name the folder that has the whole content of an iteration, or that a save writes."""
    name = original(*values, **kwargs)
    asked = inspect.signature(original).bind(*values, **kwargs).arguments
    keys = ("checkpoints_path", "iteration", "release")
    folder = original(**{key: asked[key] for key in keys if key in asked}, return_base_dir=True)
    actual = written_to(folder) if _read.get() is None else str(whole(Path(folder)))
    return actual + name.removeprefix(folder)


def _check_tracker(folder: Path) -> None:
    """Refuse to start anew beside complete checkpoints."""
    tracker = folder / TRACKER
    if tracker.exists():
        return
    latest = next(filter(is_complete, sorted(folder.glob("iter_*"), reverse=True)), None)
    if latest is not None:
        rule = f"does not exist, but {latest.name} is a complete checkpoint"
        hint = "Write its number into this file, pass --ckpt-step, or load from another folder"
        raise CheckpointError("checkpoint", str(tracker), rule, hint)


def _check_files(folder: Path) -> None:
    """Check all files of a checkpoint, once in a load; collective if ranks are connected."""
    read = _read.get()
    if read is None or folder in read.checked:
        return
    identity = check(folder)
    if form_of(folder) == "torch" and parallel_state.model_parallel_is_initialized():
        # the name of this rank's folder does not depend on the iteration, so 0 will do
        name = Path(require_upstream("get_checkpoint_name")(folder.parent, 0)).parent.name
        raise_together(lambda: _check_rank_has_file(folder / name))
    read.checked[folder] = identity


def _check_read() -> None:
    """Raise a CheckpointError if another save has replaced what this load has read."""
    read = _read.get()
    for folder, identity in ({} if read is None else read.checked).items():
        check_unchanged(folder, identity)


def _check_rank_has_file(folder: Path) -> None:
    if not (folder / RANK_FILE).exists():
        rule = "does not exist, and format torch loads only at the layout that wrote it"
        hint = "Load at that layout, then save with --ckpt-format torch_dist"
        raise CheckpointError("checkpoint", str(folder / RANK_FILE), rule, hint)


@contextmanager
def _loading(optimizer: Any) -> Iterator[None]:
    """In a block, store the optimizer, and let the trainer load all state.

    By itself, the trainer loads only what the run would save. With ``--no-save-optim``, a sharded
    Adam then continued from its initial weights.
    """
    args = owner_of("load_checkpoint").get_args()
    before = {name: value for name, value in vars(args).items() if name in _SET_MEANWHILE}
    # ``generate_state_dict`` leaves out what these flags say, also for a load
    vars(args).update(dict.fromkeys(before.keys() - {"ckpt_format"}, False))
    token = _optimizer.set(optimizer)
    try:
        yield
    finally:
        _optimizer.reset(token)
        forget_metadata()
        vars(args).update(before)


_SET_MEANWHILE = ("ckpt_format", "no_save_optim", "no_save_rng")


@around
def _at_the_step_asked_for(original: Function, tracker_filename: str) -> tuple[int, bool]:
    """Respect ``--ckpt-step`` whenever the tracker file is read.

    For distributed Adam's files, the trainer reads it again and ignores the flag. It would load the
    optimizer state of another iteration.
    """
    read = _read.get()
    step = getattr(read.args, "ckpt_step", None) if read is not None else None
    try:
        raise_together(lambda: read_tracker(Path(tracker_filename)))
    except CheckpointError:
        if not step:
            raise
        return step, False
    iteration, release = original(tracker_filename)
    return (step, False) if step and not release else (iteration, release)


@around
def _taking_the_format(original: Function, checkpoint_name: Any, args: Any) -> Any:
    """Load in the checkpoint's format, because in the run's format the trainer finds no state."""
    # the trainer asks for the format before it reads any file of the checkpoint
    _check_files(Path(checkpoint_name))
    form = original(checkpoint_name, args)
    if _optimizer.get() is not None:
        _refuse_form(str(checkpoint_name), form, args.ckpt_format)
        loads = not (args.no_load_optim or args.finetune)
        if form == "torch" and loads and any(s.in_buffers for s in _storages_of(_optimizer.get())):
            raise refuse_rank_files("checkpoint", str(checkpoint_name))
        if {form, args.ckpt_format} == {"torch", "torch_dist"}:
            args.ckpt_format = form
    return form


def _refuse_form(folder: str, form: str, wanted: str) -> None:
    """Raise unless both the checkpoint and the run are of an FSDP format, or neither is."""
    of_fsdp = fsdp_dtensor.FORMAT, "torch_dcp"
    if (form in of_fsdp) != (wanted in of_fsdp):
        rule = f"is of format {form}, and a run with --ckpt-format {wanted} cannot read it"
        hint = (
            "Load it with the FSDP flags of the run that wrote it, or convert it with Megatron's "
            "tools"
        )
        raise CheckpointError("checkpoint", folder, rule, hint)


_RATES = ("max_lr", "min_lr")
"""Settings of parameter groups, and attributes of megatron-core's scheduler."""


@contextmanager
def _rates_kept(optimizer: Any, scheduler: Any) -> Iterator[None]:
    """Keep each parameter group's own learning rates during a load.

    With ``--override-opt-param-scheduler``, megatron-core 0.20 would write ``--lr`` and
    ``--min-lr`` into all groups. With ``--use-checkpoint-opt_param-scheduler``, each group gets the
    rates that the checkpoint has for it.
    """
    # this package's optimizers; megatron-core's own keep its behaviour
    keeps = bool(_storages_of(optimizer))
    groups = optimizer.param_groups if keeps else []
    rates_of = [{key: group[key] for key in _RATES if key in group} for group in groups]
    yield
    if keeps and getattr(scheduler, "use_checkpoint_opt_param_scheduler", False):
        # collective, so also on ranks without groups
        rates_of = raise_together(lambda: _saved_rates(optimizer, rates_of))
    for group, rates in zip(optimizer.param_groups if rates_of else (), rates_of, strict=True):
        group.update(rates)
    if rates_of and scheduler is not None:
        # sets the current learning rates
        scheduler.step(0)


def _saved_rates(optimizer: Any, rates_of: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Return the checkpoint's rates for each group.

    Raises:
        CheckpointError: If the checkpoint has rates for parameters that have no group of their own.
    """
    storages = _storages_of(optimizer)
    saved = next((storage.loaded_groups for storage in storages if storage.loaded_groups), ())
    if not saved:
        return [dict(rates) for rates in rates_of]
    result, taken = [], []
    twins = [twin for storage in storages for twin in storage.twins]
    for group, twin, rates in zip(optimizer.param_groups, twins, rates_of, strict=True):
        of_twin = {key: (twin or {}).get(key, rate) for key, rate in rates.items()}
        taken.append([of_twin.get(key) for key in _RATES])
        # the checkpoint has none for what only this run overrides
        ours = overridden(group).keys() - overridden(twin or {}).keys()
        result.append({**of_twin, **{key: rates[key] for key in rates.keys() & ours}})
    others = {
        str(group.get(GROUP_ID))
        for group in saved
        if "max_lr" in group and [group.get(key) for key in _RATES] not in taken
    }
    if others:
        rule = "has learning rates for parameter groups that this run does not have"
        hint = (
            "Pass the flags of the run that wrote it, such as --decoupled-lr, or leave out "
            "--use-checkpoint-opt_param-scheduler"
        )
        raise CheckpointError("checkpoint", ", ".join(sorted(others)), rule, hint)
    return result


@around
def _matching_torch_dist(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Match requested optimizer state with a ``torch_dist`` checkpoint before it is read."""
    asked = inspect.signature(original).bind(*values, **kwargs).arguments
    if not MultiStorageClientFeature.is_enabled():
        keys = ("load_dir", "iteration", "release")
        name = require_upstream("get_checkpoint_name")
        folder = Path(name(*(asked[key] for key in keys), return_base_dir=True))
        # checkpoints beside the persistent ones have not been checked
        _check_files(folder)
        # the first of two calls, see ``_checked_load``
        if asked["rank0"]:
            raise_together(lambda: read_common_state(folder))
        elif (wanted := asked["sharded_state_dict"]) is not None:
            match(wanted, folder)
    return original(*values, **kwargs)


@around
def _matching_fsdp_dtensor(original: Function, *values: Any, **kwargs: Any) -> Any:
    """Match requested optimizer state with an ``fsdp_dtensor`` checkpoint before it is read.

    The trainer loads this format with ``allow_partial_load``, by which state that the
    checkpoint lacks would stay as it is, without an error.
    """
    asked = inspect.signature(original).bind(*values, **kwargs).arguments
    args, wanted = asked["args"], asked.get("sharded_state_dict") or {}
    # ``load_args_from_checkpoint`` calls this function without ``load_checkpoint``
    with _reading(args):
        # without "optimizer", the trainer reads only the arguments
        if args.ckpt_format == fsdp_dtensor.FORMAT and "optimizer" in wanted:
            _match_fsdp_dtensor(args, wanted["optimizer"])
        return original(*values, **kwargs)


def _match_fsdp_dtensor(args: Any, state: Mapping[str, Any]) -> None:
    """Match requested state with a checkpoint of Megatron-FSDP, if one exists; collective."""
    # all ranks read the tracker file
    folder = require_upstream("get_load_checkpoint_path_by_args")(args)
    # one rank reads the metadata, so that all decide by the same content
    exists = Path(folder, METADATA).exists
    catalogue = from_rank_0(lambda: read_catalogue(Path(folder)) if exists() else None)
    optimizer = _optimizer.get()
    storages = _storages_of(optimizer)
    if catalogue is None or not storages:
        return
    report = raise_together(lambda: fsdp_dtensor.match(storages[0], state, catalogue))
    log_lines(gather_unique(report.lines))


@around
def _under_a_wrapper(original: Function, model: Any, *rest: Any, **kwargs: Any) -> Any:
    if not isinstance(model.module, Float16Module):
        # the function expects the wrapper of 16-bit models around the module
        wrapper = nn.Module()
        wrapper.module = model
        model = wrapper
    return original(model, *rest, **kwargs)
