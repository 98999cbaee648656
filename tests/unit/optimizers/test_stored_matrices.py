"""Sums over parts of logical matrices, of which a rank may store none."""

from itertools import pairwise

import pytest
import torch

from megatron_eopt.matrices import gated, whole
from megatron_eopt.optimizers.stored_matrices import StoredMatrices
from megatron_eopt.storage.shard import Fragment, ParamShard, Ranks, fragment_layouts

ROWS, COLS = 6, 4
CUTS = [(0, 24, 24), (0, 0, 24), (0, 7, 24), (0, 13, 13, 24)]
"""Where the flattened weight is cut; a rank between two equal numbers stores nothing."""


@pytest.mark.parametrize("split", [whole((ROWS, COLS)), gated((ROWS, COLS))], ids=["one", "two"])
@pytest.mark.parametrize("cut", CUTS)
def test_ranks_together_have_the_sums_of_whole_matrices(split, cut):
    weight = torch.arange(1.0, ROWS * COLS + 1)
    fragments = [Fragment(0, *ends) for ends in pairwise(cut)]
    layouts = fragment_layouts(split, -1, 1, fragments)
    sums, squares, doubled = 0, 0, []
    for rank, fragment in enumerate(fragments):
        held = weight[fragment.start : fragment.stop].clone()
        ranks = Ranks(None, rank, len(fragments))
        shard = ParamShard("w", held, split, layouts, ranks, tuple(held.shape))
        matrices = StoredMatrices(shard, torch.device("cpu"))
        sums, squares = sums + matrices.sums(held), squares + matrices.square_sums(held)
        matrices.multiply_(held, [1.0, 2.0][: len(layouts)])
        doubled.append(held)
    # whole numbers, so that all sums but those of squares, which come from roots, are exact
    parts = weight.double().view(len(layouts), -1)
    assert torch.equal(sums, parts.sum(1))
    torch.testing.assert_close(squares, parts.square().sum(1), rtol=1e-14, atol=0)
    expected = parts * torch.tensor([[1.0], [2.0]][: len(layouts)])
    assert torch.equal(torch.cat(doubled), expected.view(-1).float())
