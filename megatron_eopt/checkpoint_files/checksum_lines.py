"""A line with the checksum of model and optimizer after every load and save of the trainer."""

import functools
from typing import Any

from megatron_eopt.base.upstream import owner_of
from megatron_eopt.checkpoint.trainer import Function, Rebindings, wrapped
from megatron_eopt.checkpoint_files.checksum import checksum


def checksum_rebindings() -> Rebindings:
    """Return what prints a checksum of the state after every load and save."""
    found: list[bool] = []
    return wrapped(
        {
            "save_checkpoint": _printing_what_was_saved,
            "load_checkpoint": functools.partial(_printing_what_was_loaded, found),
            "_load_base_checkpoint": functools.partial(_noting_what_is_found, found),
        }
    )


def _printing_what_was_saved(original: Function) -> Function:
    @functools.wraps(original)
    def save_checkpoint(
        iteration: int, model: Any, optimizer: Any, *rest: Any, **kwargs: Any
    ) -> None:
        original(iteration, model, optimizer, *rest, **kwargs)
        trainer = owner_of("load_checkpoint")
        held = None if trainer.get_args().no_save_optim else optimizer
        text = f"state checksum: {checksum(model, held)} (saved, iteration {iteration})"
        trainer.print_rank_0(text)

    return save_checkpoint


def _printing_what_was_loaded(found: list[bool], original: Function) -> Function:
    @functools.wraps(original)
    def load_checkpoint(ddp_model: Any, optimizer: Any, *rest: Any, **kwargs: Any) -> Any:
        found.clear()
        result = original(ddp_model, optimizer, *rest, **kwargs)
        if any(found):
            trainer = owner_of("load_checkpoint")
            args = trainer.get_args()
            held = None if args.no_load_optim or args.finetune else optimizer
            text = f"state checksum: {checksum(ddp_model, held)} (loaded, iteration {result[0]})"
            trainer.print_rank_0(text)
        return result

    return load_checkpoint


def _noting_what_is_found(found: list[bool], original: Function) -> Function:
    @functools.wraps(original)
    def _load_base_checkpoint(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        found.append(result[0] is not None)
        return result

    return _load_base_checkpoint
