"""megatron.core.dist_checkpointing writes and reads under the CPU back end, in both layouts."""

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from torch.utils._pytree import tree_iter

from megatron_eopt.cpu.megatron_parts import with_copies
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt


@on_ranks(1)
def test_a_process_that_lives_on_is_handed_copies(tmp_path: Path) -> None:
    initialize_megatron()
    model: Any = tiny_gpt()
    plain = dist_checkpointing.save(
        model.sharded_state_dict(), tmp_path, async_sharded_save=True, async_strategy="mcore"
    )
    copy = with_copies(plain)
    plain_tensors, tensors = (
        [item for item in tree_iter(handed) if isinstance(item, torch.Tensor)]
        for handed in ((it.async_fn_args, it.preload_fn.args) for it in (plain, copy))
    )
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert any(tensor.untyped_storage().data_ptr() in own for tensor in plain_tensors)
    assert not any(tensor.untyped_storage().data_ptr() in own for tensor in tensors)
    assert len(tensors) == len(plain_tensors)
    assert all(map(torch.equal, plain_tensors, tensors))
