"""What optimizers, checkpoints and chains ask of a storage."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_eopt.base.names import COPY_ATTRIBUTE


class Stored(NamedTuple):
    """What this rank stores of one of the model's parameters."""

    param: Tensor  # the model's
    main: Tensor  # what is stepped: the same, its float32 copy, or this rank's part of it
    start: int  # first element of the flattened local parameter that ``main`` holds
    stop: int  # one past the last


class Storage:
    """Keeps weights; stands before one of megatron-core's wrappers of a torch optimizer."""

    optimizer: Any  # the torch optimizer, with groups and state of what is stepped
    steps: int = 0  # done, the same on every rank
    is_stub_optimizer: bool  # whether it has no parameter on any rank
    grad_scaler: Any = None  # the loss scale of the chain; None without
    _handed_out: Sequence[Tensor] | None = None  # mains that had their copies in this step

    def count_in(self, stats: Any, collection: Any) -> None:
        """Let megatron-core count every gradient once, over the ranks of ``stats``."""
        self.grad_stats_parallel_group = stats
        self.tp_group = collection.tp
        self.expert_tp_group = getattr(collection, "expt_tp", None) or collection.tp

    def stored(self) -> Iterator[Stored]:
        """Yield what this rank stores, in an order that does not change."""
        raise NotImplementedError

    def tensors_of(self, item: Stored) -> dict[str, Any]:
        """Return main weights, where they are not the model's, and state, by kind; all live."""
        raise NotImplementedError

    def common_state(self, steps: Sequence[int], main: str | None) -> dict[str, Any]:
        """Return what checkpoints have once for all ranks: groups, steps and loss scale.

        States of each parameter group count ``steps``, -1 where none count any. Of whole parameters
        megatron-core names all optimizers but the ``main`` one in groups, and matches these by it.
        """
        raise NotImplementedError

    def collect_gradients(self) -> None:
        """Hand this step's gradients to what is stepped, in its data type."""
        if not self.is_stub_optimizer:
            self._copy_model_grads_to_main_grads()  # type: ignore[attr-defined]

    def gradient_of(self, item: Stored) -> Tensor | None:
        """Return the gradient that what is stored steps with; None where it rests."""
        return item.main.grad

    def gather_params(self, *, now: bool = False) -> None:
        """Bring the stepped weights to all ranks, unless hooks or DDP will, and not ``now``."""

    @torch.no_grad()
    def quantize_and_sync_model_params_from_main_params(self) -> None:
        """Let the model have the main weights, on all ranks; collective.

        megatron-core 0.20 asks chains and their members for it after every load.
        """
        self._stage_model_params_from_main_params()
        for chunk in getattr(self, "model_chunks", ()):
            gather_buckets(chunk, now=True)
        self.gather_params(now=True)

    @torch.no_grad()
    def _stage_model_params_from_main_params(self) -> None:
        """Do the same on this rank alone; float32 weights are their own main weights."""
        if not self.is_stub_optimizer and hasattr(self, "_copy_main_params_to_model_params"):
            self._copy_main_params_to_model_params()

    def step_in_chain(self) -> bool:
        """Step as a member of a chain, which brings stepped weights to all ranks afterwards."""
        return self.step_with_ready_grads()

    def step_with_ready_grads(self) -> bool:
        """Step, and count the step if it was done."""
        with self.handing_out():
            done = bool(super().step_with_ready_grads())  # type: ignore[misc]
        self.steps += done
        return done

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """Let who steps a main weight write the model's as well, in a block."""
        copies = self.copies()
        for main, copy in copies:
            setattr(main, COPY_ATTRIBUTE, copy)
        self._handed_out = [main for main, _ in copies]
        try:
            yield
        finally:
            self._handed_out = None

    def copies(self) -> list[tuple[Tensor, Tensor]]:
        """Return main weights with what the model has of them, rounded, if that is apart.

        Who steps one may write the other at once, see :func:`handed_out`.
        """
        return []

    @torch.no_grad()
    def copy_mains(self, mains: Iterable[Tensor] | None = None) -> None:
        """Let the model have the main weights; in a step those, or some, that it still lacks."""
        if self._handed_out is None:
            pairs = self.copies()
        else:
            wanted = self._handed_out if mains is None else mains
            left = [(main, handed_out(main)) for main in wanted]
            pairs = [(main, copy) for main, copy in left if copy is not None]
        if pairs:
            mains, copies = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, mains)

    def replica_of(self, replica: Any) -> tuple[int, ...]:
        """Return which copy of stored state this rank has, from that of the model's parameter."""
        return replica if isinstance(replica, tuple) else (replica,)

    def replica_of_matrix(self, replica: Any) -> tuple[int, ...]:
        """Return the same of state that is not cut like the parameter."""
        return self.replica_of(replica)


def handed_out(main: Tensor) -> Tensor | None:
    """Return what the model has of a main weight, to be written with it; None if nobody must.

    Whoever asks writes it, and it will not be copied after the step.
    """
    copy: Tensor | None = main.__dict__.pop(COPY_ATTRIBUTE, None)
    return copy


def gather_buckets(model_chunk: Any, *, now: bool = False) -> None:
    """Bring stepped weights in Megatron's buffers to all ranks; collective.

    Where that overlaps with the forward pass hooks do it, unless ``now``.
    """
    wrapped = model_chunk.ddp_config
    in_buffers = wrapped.use_distributed_optimizer and not wrapped.use_megatron_fsdp
    if in_buffers and (now or not wrapped.overlap_param_gather):
        # else megatron-core takes what is under way for what is asked for
        finish_gathers([model_chunk])
        model_chunk.start_param_sync(force_sync=now)


def finish_gathers(model_chunks: Iterable[Any]) -> None:
    """Wait for buckets that are being gathered, before anything else is written to them."""
    kinds = ("bucket_groups", "expert_parallel_bucket_groups")
    for group in (g for chunk in model_chunks for kind in kinds for g in getattr(chunk, kind, ())):
        if group.param_gather_handle is not None:
            group.finish_param_sync(skip_next_bucket_dispatch=True)


def named_gradients(storage: Storage) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the model's parameters with the gradients that their main copies step with."""
    for item in storage.stored():
        if (grad := storage.gradient_of(item)) is not None:
            yield item.param, grad
