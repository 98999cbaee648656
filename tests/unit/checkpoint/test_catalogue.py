"""What a checkpoint has, from its metadata and without its tensors."""

import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_eopt.base.agreement import CheckpointError
from megatron_eopt.checkpoint.catalogue import Catalogue, Saved, by_key, read_catalogue
from megatron_eopt.checkpoint.saved_state import StateValue
from megatron_eopt.guard import contents
from megatron_eopt.state.groups import BY_PARAMETER


@pytest.mark.parametrize("content", [[1], Metadata({}, storage_data=None)])
def test_files_with_something_else_are_refused(tmp_path, content):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match="is no metadata of torch"):
        contents.read_metadata(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        contents.read_rank_file(tmp_path / "rank.pt")
    torch.save([1], tmp_path / "rank.pt")
    with pytest.raises(CheckpointError, match="contains a list, not a state dict"):
        contents.read_rank_file(tmp_path / "rank.pt")


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("decoder.weight", {"kind": None, "name": "decoder.weight"}),
        ("optimizer.state.exp_avg.w.weight", {"kind": "exp_avg", "name": "w.weight"}),
        ("optimizer.param_groups", {"kind": None, "name": "param_groups"}),
        (
            "chained_1.optimizer.matrix_state.m.w.1of2.tp0of4",
            {"kind": "m", "name": "w", "of_matrix": True, "slabs": 4, "chain": "chained_1."},
        ),
        (
            "optimizer.distributed.dp_group_idx_0.dtype_x.bucket_idx_0.exp_avg",
            {
                "kind": "exp_avg",
                "name": "distributed.dp_group_idx_0.dtype_x.bucket_idx_0.exp_avg",
                "in_bucket": True,
            },
        ),
        (
            "optimizer.state.exp_avg.w.bucket_idx_0.x",
            {"kind": "exp_avg", "name": "w.bucket_idx_0.x", "in_bucket": True},
        ),
    ],
)
def test_what_a_key_says(key, fields):
    facts = ((2, 3), torch.float32, (1, 2))
    expected = Saved(**{"shape": facts[0], "dtype": facts[1], "cuts": facts[2], **fields})
    assert by_key(key, *facts) == expected


def test_state_of_parameters_and_in_buckets_are_told_apart():
    values = {
        name: Saved(kind, name, in_bucket=bucket)
        for kind, name, bucket in [
            ("exp_avg", "w", False),
            (None, "model", False),
            ("exp_avg_sq", "all", True),
            (None, "rest", True),
        ]
    }
    catalogue = Catalogue("torch_dist", values)
    assert catalogue.state == {"w": {"exp_avg": values["w"]}}
    assert catalogue.in_buckets == {"exp_avg_sq"}
    assert catalogue.shapes == dict.fromkeys(values)
    assert Catalogue("torch", {}, {"optimizer": {"param_groups": []}}).groups is not None


def test_the_first_rank_speaks_for_all_in_format_torch(tmp_path):
    for rank in (1, 0):
        folder = tmp_path / f"mp_rank_0{rank}"
        folder.mkdir()
        torch.save({"iteration": rank}, folder / "model_optim_rng.pt")
    catalogue = read_catalogue(tmp_path)
    assert (catalogue.form, catalogue.values, catalogue.common) == ("torch", {}, {"iteration": 0})


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="is no complete checkpoint"):
        read_catalogue(tmp_path)


@pytest.mark.parametrize("form", [None, "own"])
@pytest.mark.parametrize("groups", [False, True])
def test_torchs_own_format(tmp_path, form, groups):
    settings = {"w": {"maximize": True, "lr": 0.1, "optimizer": "muon"}}
    args = SimpleNamespace(**({"ckpt_format": form} if form else {}))
    torch.serialization.add_safe_globals([SimpleNamespace])
    checkpoint.save(
        {
            "model": {"w": torch.ones(2, 3)},
            "state": torch.ones(1),
            "chain": {
                "optimizer": {
                    "state": {"w": {"exp_avg": torch.ones(2, 3, dtype=torch.bfloat16), "step": 3}},
                    **({BY_PARAMETER: settings} if groups else {}),
                }
            },
            "iteration": 7,
            **({"args": args} if form else {}),
        },
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    catalogue = read_catalogue(tmp_path)
    usual = "fsdp_dtensor" if groups else "torch_dcp"
    assert catalogue.form == (form or usual)
    assert catalogue.common["iteration"] == 7
    assert catalogue.values["model.w"] == Saved(None, "model.w", (2, 3), torch.float32, (1, 1))
    assert catalogue.values["state"].kind is None
    assert catalogue.state == {
        "w": {
            "exp_avg": Saved("exp_avg", "w", (2, 3), torch.bfloat16, (1, 1)),
            "step": Saved("step", "w"),
        }
    }
    # only values that tell what state means are read
    assert catalogue.settings == ({"w": settings["w"] | {"lr": None}} if groups else {})


def test_megatron_cores_format(tmp_path):
    size = torch.Size([2, 3])
    chunks = [ChunkStorageMetadata(torch.Size(offset), size) for offset in ((0, 0), (2, 0))]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 3]), chunks)
    items = {"optimizer.state.exp_avg.w": tensor, "rng": BytesStorageMetadata()}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(items, storage_data={})))
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"iteration": 3}, tmp_path / "common.pt")
    catalogue = read_catalogue(tmp_path)
    assert (catalogue.form, catalogue.common) == ("torch_dist", {"iteration": 3})
    assert catalogue.values == {
        "optimizer.state.exp_avg.w": Saved("exp_avg", "w", (4, 3), torch.float32, (2, 1)),
        "rng": Saved(None, "rng"),
    }
    assert not catalogue.settings
    assert not catalogue.bucket_common


@pytest.mark.parametrize("chain", ["", "chained_1."])
def test_a_value_says_how_the_checkpoints_differs(chain):
    key = "optimizer.state.exp_avg.w"
    piece = ShardedTensor.from_rank_offsets(key, torch.zeros(2, 3), (0, 1, 2))
    value = StateValue(None, "exp_avg", (piece, piece), flat=torch.zeros(6))

    def has(shape: tuple[int, ...] | None, dtype: torch.dtype | None = None) -> Catalogue:
        saved = Saved("exp_avg", "w", shape, dtype, chain=chain)
        return Catalogue("torch_dist", {"other": Saved(None, "other"), chain + key: saved})

    assert value.misfit_in(has((3, 3))) == "of shape (3, 3) must have shape (4, 3)"
    assert value.misfit_in(has((4, 3))).startswith("is of other matrices, or of another")
    assert value.misfit_in(has(None)).startswith("is of other matrices, or of another")
    assert [*value.dtypes_in(has((4, 3), torch.bfloat16))] == [(torch.bfloat16, torch.float32)]
    assert not [*value.dtypes_in(has((4, 3), torch.float32))]
    assert not [*value.dtypes_in(has((4, 3)))]
    # what is not cut like its parameter may have any dtype
    assert not [*replace(value, flat=None).dtypes_in(has((4, 3), torch.bfloat16))]


def test_a_stack_speaks_for_layers_that_have_state():
    """It may have had the state of other layers alone."""
    groups = [{"optimizer": "muon", "param_names": ["layers.w"]}]
    catalogue = Catalogue("torch_dist", {}, {"optimizer": {"param_groups": groups}})
    for kinds in (frozenset({"momentum_buffer"}), frozenset()):
        names = ("layers.1.w", "layers.w")
        saved = catalogue.state_of(names, kinds, frozenset(), is_matrix=True)
        assert len(saved.writers) == len(kinds)
