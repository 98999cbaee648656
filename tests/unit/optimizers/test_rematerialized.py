"""Muon on rows that weight rematerialization has cut: each mode gives the whole matrix's update."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron

ROWS, COLUMNS = 120, 64
MODES = ["duplicated", "distributed", "exchange", "auto", "blockwise"]


def muon(**settings):
    placeholder = [torch.nn.Parameter(torch.zeros(1, 1))]
    return TensorParallelMuon(placeholder, fp32_matmul_prec="highest", **settings)


def whole():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def piece_of(matrix, dim, padding):
    """Return this rank's piece, first of tensor parallelism, and how many of its rows count."""
    if dim != -1:
        part = parallel_state.get_tensor_model_parallel_rank()
        matrix = matrix.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)[part]
    pieces = parallel_state.get_gtp_weight_remat_world_size()
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, padding))
    number, height = parallel_state.get_gtp_weight_remat_rank(), len(padded) // pieces
    counted = min(height, max(0, len(matrix) - number * height))
    return padded.chunk(pieces)[number].contiguous(), counted


def _alone(matrix):
    return muon().scaled_orthogonalize_fn(matrix)


@pytest.mark.parametrize(
    ("ranks", "tp", "dim", "padding"),
    [
        pytest.param(4, 1, -1, 8, id="alone"),
        pytest.param(4, 1, -1, 200, id="padding on three ranks"),
        pytest.param(4, 2, 0, 4, id="rows"),
        pytest.param(4, 2, 1, 8, id="columns"),
        pytest.param(8, 2, 0, 20, id="rows, more pieces", marks=pytest.mark.long),
        pytest.param(8, 4, 0, 2, id="rows, more slabs", marks=pytest.mark.long),
        pytest.param(8, 2, 1, 8, id="columns, more pieces", marks=pytest.mark.long),
        pytest.param(8, 4, 1, 8, id="columns, more slabs", marks=pytest.mark.long),
    ],
)
@on_ranks("ranks")
def test_every_mode_gives_the_rows_of_the_whole_update(ranks, tp, dim, padding):
    """Compare this rank's updates with the reference, and their padding with zero.

    Blockwise, which changes updates, takes each rank's rows for a matrix.
    """
    initialize_megatron(tp=tp, gtp=ranks // tp)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    piece, counted = piece_of(whole(), dim, padding)
    param = torch.nn.Parameter(piece.clone())
    # as tests of megatron-core mark it, plus the padding
    param.is_gtp_weight_remat, param.pad_length = True, padding
    if dim != -1:
        param.partition_dim, param.tensor_model_parallel = dim, True
    for mode in MODES:
        optimizer = muon(tp_mode=mode, pg_collection=collection)
        expected = torch.zeros_like(piece)
        if mode != "blockwise":
            expected = piece_of(_alone(whole()), dim, padding)[0]
        elif counted:
            expected[:counted] = _alone(piece[:counted])
        # what megatron-core's own Muon and its tests call
        call = optimizer.scaled_orthogonalize_fn_with_gtp_remat
        named = None if dim == -1 or mode == "blockwise" else dim
        for name, update in (
            ("step", optimizer.orthogonalize(param, piece)),
            ("call", call(param, piece, collection.tp, named)),
        ):
            assert (update - expected).abs().max() < 1e-5, (mode, name)
            assert not update[counted:].any(), (mode, name)


@pytest.mark.parametrize("mode", ["duplicated", "distributed", "blockwise"])
@on_ranks(2)
def test_a_slab_has_the_update_of_the_dimension_that_is_named(mode):
    """Compare the updates of tensor-parallel slabs with the reference."""
    initialize_megatron(tp=2)
    group = ProcessGroupCollection.use_mpu_process_groups().tp
    for dim in (0, 1):
        mine = whole().chunk(2, dim)[group.rank()]
        update = muon(tp_mode=mode).scaled_orthogonalize_fn(mine, group, partition_dim=dim)
        assert (update - _alone(whole()).chunk(2, dim)[group.rank()]).abs().max() < 1e-5
