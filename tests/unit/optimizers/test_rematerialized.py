"""Muon on rows that weight rematerialization has cut: each mode gives the whole matrix's update."""

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron

ROWS, COLUMNS, PADDING = 120, 64, 8
"""With padding, rows are a multiple of every number of pieces."""


def muon(**settings):
    placeholder = [torch.nn.Parameter(torch.zeros(1, 1))]
    return TensorParallelMuon(placeholder, fp32_matmul_prec="highest", **settings)


def whole():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


def piece_of(matrix, dim):
    """Return this rank's piece, first of tensor parallelism, and how many of its rows count."""
    if dim != -1:
        part = parallel_state.get_tensor_model_parallel_rank()
        matrix = matrix.chunk(parallel_state.get_tensor_model_parallel_world_size(), dim)[part]
    pieces = parallel_state.get_gtp_weight_remat_world_size()
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, PADDING))
    number, height = parallel_state.get_gtp_weight_remat_rank(), len(padded) // pieces
    counted = min(height, max(0, len(matrix) - number * height))
    return padded.chunk(pieces)[number].contiguous(), counted


def updates(tp, gtp, dim, modes):
    """Return, for each mode, how far this rank's update is from the reference, and from zero."""
    initialize_megatron(tp=tp, gtp=gtp)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    piece, counted = piece_of(whole(), dim)
    param = torch.nn.Parameter(piece.clone())
    # as tests of megatron-core mark it, plus the padding
    param.is_gtp_weight_remat, param.pad_length = True, PADDING
    if dim != -1:
        param.partition_dim, param.tensor_model_parallel = dim, True
    found = {}
    for mode in modes:
        update = muon(tp_mode=mode, pg_collection=collection).orthogonalize(param, piece)
        expected = torch.zeros_like(piece)
        if mode != "blockwise":
            expected = piece_of(_alone(whole()), dim)[0]
        elif counted:
            expected[:counted] = _alone(piece[:counted])
        found[mode] = float((update - expected).abs().max()), float(update[counted:].abs().sum())
    return found


def _alone(matrix):
    plain = muon()
    return plain.orthogonalize(torch.nn.Parameter(matrix.clone()), matrix)


@pytest.mark.parametrize(
    ("tp", "gtp", "dim"), [(1, 4, -1), (2, 2, 0), (2, 2, 1)], ids=["alone", "rows", "columns"]
)
def test_every_mode_gives_the_rows_of_the_whole_update(tp, gtp, dim):
    """Blockwise, which changes updates, takes each rank's rows for a matrix."""
    modes = ["duplicated", "distributed", "exchange", "auto", "blockwise"]
    for found in run_ranks(4, updates, tp, gtp, dim, modes):
        for mode, (far, padding) in found.items():
            assert far < 1e-5, mode
            assert padding == 0, mode
