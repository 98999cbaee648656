"""Weights whose input dimension comes first are one matrix, square or not, and build."""

import pytest
import torch
from torch import nn

from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.splits import find_splits
from tests.unit.fsdp2.model import config, eager


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose1d(8, 4, 3, bias=False), (8, 12)),
        (nn.ConvTranspose2d(8, 4, 3, bias=False), (8, 36)),
        (nn.ConvTranspose3d(4, 6, 2, bias=False), (4, 48)),
    ],
)
@eager
def test_a_transposed_convolution_is_one_matrix(layer, shape):
    model = nn.Sequential(layer)
    optimizer = build_optimizer(model, config(muon_convolutions=True))
    (split,) = find_splits(places_in([model]), which=(), flattened={layer.weight}).values()
    assert (split.shape, split.transposed, len(split.matrices)) == (shape, True, 1)
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.randn_like(layer.weight)
    optimizer.step()
    assert not torch.equal(before, layer.weight)


@eager
def test_gpt2s_layers_build():
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(settings)
    build_optimizer(model, config())
    block = model.transformer.h[0]
    weights = (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc, block.mlp.c_proj)
    splits = find_splits(places_in([model]), which=())
    found = [splits[linear.weight] for linear in weights]
    assert [split.shape for split in found] == [(8, 24), (8, 8), (8, 32), (32, 8)]
    assert all(split.transposed and len(split.matrices) == 1 for split in found)


@eager
def test_a_projection_of_one_head_is_no_unknown_one(caplog):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.head_dim = 4
            self.q_proj, self.k_proj, self.v_proj = (
                nn.Linear(8, 8),
                nn.Linear(8, 4),
                nn.Linear(8, 4),
            )

    build_optimizer(nn.ModuleList([Attention()]), config(muon_split_per_head=True))
    assert "muon_split_per_head" not in caplog.text
