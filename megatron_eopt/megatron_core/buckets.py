"""The gathers of Megatron's buckets."""

from collections.abc import Iterable
from typing import Any


def gather_buckets(model_chunk: Any, *, now: bool = False) -> None:
    """Gather the stepped weights in Megatron's buffers to all ranks; collective.

    If the gather overlaps with the forward pass, hooks do it, unless ``now``.
    """
    wrapped = model_chunk.ddp_config
    # Megatron-FSDP has buffers of its own, and gathers from them in its own hooks
    in_buffers = wrapped.use_distributed_optimizer and not wrapped.use_megatron_fsdp
    if in_buffers and (now or not wrapped.overlap_param_gather):
        # else megatron-core would take a gather in progress for this one
        finish_gathers([model_chunk])
        model_chunk.start_param_sync(force_sync=now)


def finish_gathers(model_chunks: Iterable[Any]) -> None:
    """Wait for bucket gathers in progress, before anything else is written to the buckets."""
    for chunk in model_chunks:
        for kind in ("bucket_groups", "expert_parallel_bucket_groups"):
            for group in getattr(chunk, kind, ()):
                if group.param_gather_handle is not None:
                    # the next bucket would be gathered with the weights from before
                    group.finish_param_sync(skip_next_bucket_dispatch=True)
