"""Each split against what megatron-core's own code does with the fused weight."""

from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from torch import nn

from megatron_eopt.matrices import Split, matrix_rows
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.splits import find_splits
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.reference.parts import merge_local, split_local
from tests.unit.routing import modules

ALL: Any = ("qkv", "gated", "mla", "linear_attention")


def only(module: nn.Module) -> tuple[nn.Parameter, Split]:
    ((param, split),) = find_splits(places_in([module]), which=ALL).items()
    return param, split


def pieces_of(param: nn.Parameter, split: Split, tp_size: int) -> list[np.ndarray]:
    rank = parallel_state.get_tensor_model_parallel_rank()
    found = split_local(param.detach(), split, tp_size, rank, 0 if tp_size > 1 else -1)
    return [piece.numpy() for piece in found]


def assemble(split: Split, pieces: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    """Put the pieces of all ranks where the runs say; every row must come from one rank."""
    tp_size = len(pieces)
    matrices = {}
    for index, matrix in enumerate(split.matrices):
        rebuilt = np.full(matrix.shape, np.nan, dtype=np.float32)
        for rank in range(tp_size):
            taken = 0
            runs = matrix_rows(split, tp_size, rank, 0)[index]
            for _, logical, length in runs.triples():
                rebuilt[logical : logical + length] = pieces[rank][index][taken : taken + length]
                taken += length
        matrices[matrix.name] = rebuilt
    return matrices


def rows_used(activations: torch.Tensor) -> np.ndarray:
    """Turn ``(hidden, 1, heads, dim)``, what an identity matrix gave, into the rows used."""
    return activations.detach().flatten(1).T.numpy()


def attention_rank(tp_size: int, groups: int, gate: bool) -> Any:
    modules.set_up(tp_size)
    settings = modules.config(tp_size, num_query_groups=groups, attention_output_gate=gate)
    module = modules.attention(settings)
    param, split = only(module)
    identity = torch.eye(modules.HIDDEN).unsqueeze(1)
    used = module.get_query_key_value_tensors(identity, output_gate=gate)
    return split, pieces_of(param, split, tp_size), [rows_used(tensor) for tensor in used]


@pytest.mark.parametrize(
    ("tp_size", "groups", "gate"),
    [(1, 4, False), (1, 1, True), (2, 2, True), (2, 1, True), (4, 2, False), (4, 1, False)],
)
def test_attention_uses_these_rows(tp_size: int, groups: int, gate: bool) -> None:
    ranks = run_ranks(tp_size, attention_rank, tp_size, groups, gate)
    split = ranks[0][0]
    found = assemble(split, [pieces for _, pieces, _ in ranks])
    copies = max(tp_size // groups, 1)  # ranks that share the key of one group
    for number, name in enumerate(["q", "k", "v", "gate"] if gate else ["q", "k", "v"]):
        step = copies if name in "kv" else 1
        used = np.concatenate([rows[number] for _, _, rows in ranks[::step]])
        # an identity times a weight adds zeros to each element, so nothing is rounded
        assert np.array_equal(found[name], used)


def mlp_rank(tp_size: int) -> Any:
    modules.set_up(tp_size)
    module = modules.mlp(modules.config(tp_size, **modules.GATED))
    param, split = only(module)
    torch.manual_seed(5)
    inputs = torch.randn(7, 1, modules.HIDDEN)
    fc2 = module.linear_fc2.weight.detach().numpy()
    output = module(inputs)[0].detach().numpy()
    return split, pieces_of(param, split, tp_size), fc2, inputs.numpy(), output


def test_gate_and_up_of_a_mlp() -> None:
    cut = run_ranks(2, mlp_rank, 2)
    found = assemble(cut[0][0], [rank[1] for rank in cut])
    inputs, output = cut[0][3].astype(np.float64), cut[0][4]
    gate, up = inputs @ found["gate"].T, inputs @ found["up"].T
    by_hand = (gate / (1 + np.exp(-gate)) * up) @ np.concatenate([r[2] for r in cut], 1).T
    # float32 sums of at most 24 and 20 products
    np.testing.assert_allclose(output, by_hand, rtol=1e-4, atol=1e-8)


# (linear module, part set to zero) and what of query, key, value must become zero by that
ZEROED = [
    ("linear_q_up_proj", "q_pos", {"q_pos"}),
    ("linear_q_up_proj", "q_nope", {"q_nope"}),
    ("linear_kv_up_proj", "k_nope", {"k_nope"}),
    ("linear_kv_up_proj", "v", {"v"}),
    ("linear_kv_down_proj", "k_pos", {"k_pos"}),
    ("linear_kv_down_proj", "kv", {"k_nope", "v"}),
]
ZEROED_FUSED = [
    *ZEROED[:4],
    ("linear_qkv_down_proj", "q", {"q_pos", "q_nope"}),
    ("linear_qkv_down_proj", "kv", {"k_nope", "v"}),
    ("linear_qkv_down_proj", "k_pos", {"k_pos"}),
]
NO_LOW_RANK = [("linear_q_proj", "q_pos", {"q_pos"}), ("linear_q_proj", "q_nope", {"q_nope"})]


LATENT = [(False, True, ZEROED), (True, True, ZEROED_FUSED), (False, False, NO_LOW_RANK)]


@pytest.mark.parametrize("tp_size", [1, 2])
@on_ranks("tp_size")
def test_latent_attention_uses_these_rows(tp_size: int) -> None:
    modules.set_up(tp_size)
    for fused, low_rank, cases in LATENT:
        settings = modules.mla_config(tp_size, **({} if low_rank else {"q_lora_rank": None}))
        module = modules.mla(settings, fused=fused)
        splits = find_splits(places_in([module]), which=["mla"])
        assert len(splits) == len({linear for linear, _, _ in cases}) + (0 if low_rank else 2)
        for linear, part, expected in cases:
            assert zeros_after(module, splits, tp_size, linear, part) == expected


def zeros_after(
    module: Any, splits: dict[nn.Parameter, Split], tp_size: int, linear: str, part: str
) -> set[str]:
    weight = getattr(module, linear).weight
    split = splits[weight]
    before = weight.detach().clone()
    cut = (split, tp_size, parallel_state.get_tensor_model_parallel_rank(), 0)
    pieces = [piece.clone() for piece in split_local(before, *cut)]
    for matrix, piece in zip(split.matrices, pieces, strict=True):
        if matrix.name == part:
            piece.zero_()
    weight.data.copy_(merge_local(pieces, *cut))
    torch.manual_seed(7)
    inputs = torch.randn(5, 1, modules.HIDDEN)
    query, key, value = module.get_query_key_value_tensors(inputs, None, None)[:3]
    weight.data.copy_(before)
    nope = module.config.qk_head_dim
    parts = {
        "q_nope": query[..., :nope],
        "q_pos": query[..., nope:],
        "k_nope": key[..., :nope],
        "k_pos": key[..., nope:],
        "v": value,
    }
    return {name for name, tensor in parts.items() if not tensor.any()}


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("build", [modules.gated_delta_net, modules.mamba])
@on_ranks("tp_size")
def test_linear_attention_is_split_as_its_checkpoint_is(tp_size: int, build: Any) -> None:
    """Compare our pieces with what the module's own checkpoint splits its weight into."""
    modules.set_up(tp_size)
    module = build(tp_size)
    param, split = only(module)
    factory = module.sharded_state_dict(metadata=None)["in_proj.weight"]
    rows = matrix_rows(split, tp_size, parallel_state.get_tensor_model_parallel_rank(), 0)
    found = zip(split.matrices, pieces_of(param, split, tp_size), rows, strict=True)
    for (matrix, piece, runs), saved in zip(found, factory.build(), strict=True):
        assert matrix.name == saved.key.rpartition(".")[2]
        assert matrix.shape == tuple(saved.global_shape)
        assert np.array_equal(piece, saved.data.detach())
        assert [at for _, at, _ in runs.triples()] == [saved.global_offset[0]]
