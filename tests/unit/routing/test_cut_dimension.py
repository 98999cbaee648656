"""Which dimension of a weight tensor parallelism cuts."""

import pytest
import torch
from torch import nn

from megatron_eopt.routing.parameters import cut_dimension


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, -1),
        ({"partition_dim": 0}, 0),
        ({"partition_dim": 1, "tensor_model_parallel": True}, 1),
        ({"partition_dim": -1, "tensor_model_parallel": True}, -1),
        # Transformer Engine gives duplicated weights a dimension, too
        ({"partition_dim": 0, "tensor_model_parallel": False}, -1),
    ],
)
def test_duplicated_weights_are_not_cut(attributes, expected):
    param = nn.Parameter(torch.zeros(4, 4))
    for name, value in attributes.items():
        setattr(param, name, value)
    assert cut_dimension(param) == expected
