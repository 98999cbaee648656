"""What a sharded state dict holds, in terms that do not depend on the layout of the run."""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from torch import distributed

from megatron_eopt.base.agreement import device_of_collectives, everyones
from megatron_eopt.checkpoint.keys import split_key, tensors
from megatron_eopt.checkpoint_files.checksum import hash_of_text


def describe(sharded_state_dict: Any) -> dict[str, Any]:
    """Return what a manifest says of a model; all ranks call this together.

    An optimizer's tensors may be among the model's own.

    Returns:
        "parameters": elements of all model tensors; "tensors": their number; "digest": of their
        names and global shapes; "optimizer_state": kinds of state in the optimizer's tensors.
    """
    elements, count, digest = 0, 0, 0
    kinds = set()
    for item in tensors(sharded_state_dict):
        of_optimizer = split_key(item.key)
        if of_optimizer is not None:
            kinds.add(of_optimizer[0] or "buckets")
        elif is_main_replica(item.replica_id) and not any(item.global_offset):
            elements += torch.Size(item.global_shape).numel()
            count += 1
            digest += hash_of_text(f"{item.key} {tuple(item.global_shape)}")
    # the int64 with the digest's lowest 64 bits
    signed = (digest + 2**63) % 2**64 - 2**63
    totals = torch.tensor([elements, count, signed], device=device_of_collectives())
    if distributed.is_initialized():
        distributed.all_reduce(totals)
    return {
        "parameters": int(totals[0]),
        "tensors": int(totals[1]),
        "digest": f"{int(totals[2]) % 2**64:016x}",
        "optimizer_state": sorted(everyones(sorted(kinds))),
    }
