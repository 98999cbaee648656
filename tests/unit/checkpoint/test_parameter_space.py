"""Where the elements of a parameter are in checkpoints."""

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map
from torch import nn

from megatron_eopt.checkpoint.parameter_space import parameter_spaces


def test_tied_weights_have_the_name_that_megatron_core_gives_their_state():
    tied, other = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(2))
    entries = {"embedding": tied, "norm": other, "output": tied}
    state = {key: ShardedTensor.from_rank_offsets(key, data) for key, data in entries.items()}
    spaces = parameter_spaces(state, [tied, other])
    by_number = get_param_id_to_sharded_param_map(state, [tied, other])
    assert [spaces[tied].key, spaces[other].key] == [entry.key for entry in by_number.values()]
