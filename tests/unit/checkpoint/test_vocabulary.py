"""A run keeps the padding of the vocabulary in its checkpoint."""

import math
import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_eopt.checkpoint import vocabulary
from megatron_eopt.checkpoint.sources import tensor_sources
from tests.harness import run_ranks
from tests.harness.log import listening
from tests.harness.megatron import initialize_megatron


def padded(tokens: int, args: Namespace, logging_enabled: bool = True) -> int:
    """Pad as Megatron does."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return math.ceil(tokens / multiple) * multiple


@pytest.mark.parametrize(
    ("saved", "tokens", "tensor", "divisor", "rows"),
    [
        pytest.param(384, 257, 1, 128, 384, id="as the run that wrote it"),
        pytest.param(384, 257, 2, 128, 384, id="more tensor-parallel ranks"),
        pytest.param(1024, 257, 1, 128, 1024, id="fewer"),
        pytest.param(384, 257, 5, 128, 385, id="not divisible"),
        pytest.param(384, 385, 2, 128, 512, id="more tokens"),
        pytest.param(384, 257, 2, 256, 512, id="another divisor"),
        pytest.param(None, 257, 2, 128, 512, id="an unknown size"),
        pytest.param(None, 1, 2, 128, 256, id="an unknown size, one token"),
    ],
)
def test_padding_is_that_of_the_checkpoint(tmp_path, caplog, saved, tokens, tensor, divisor, rows):
    caplog.set_level("INFO")
    written = Namespace(padded_vocab_size=saved, make_vocab_size_divisible_by=128)
    place = tmp_path / "second" / "iter_0000007"
    place.mkdir(parents=True)
    (place.parent / "latest_checkpointed_iteration.txt").write_text("7")
    (place / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    torch.save({"args": written}, place / "common.pt")
    folders = {"load": tmp_path / "first", "pretrained_checkpoint": tmp_path / "second"}
    run = Namespace(**folders, make_vocab_size_divisible_by=divisor)
    run.tensor_model_parallel_size = tensor
    for run.rank, logs in ((1, [True]), (0, [False]), (0, [])):
        assert "keeps the padding" not in caplog.text
        assert vocabulary.keeping_padding(padded)(tokens, run, *logs) == rows
    assert ("keeps the padding" in caplog.text) == (rows != padded(tokens, run))


@pytest.mark.parametrize("content", [{}, {"latest_checkpointed_iteration.txt": "7"}], ids=len)
def test_without_a_readable_checkpoint_megatron_pads(tmp_path, content):
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    run = Namespace(load=str(tmp_path), make_vocab_size_divisible_by=128, rank=0)
    run.tensor_model_parallel_size = 2
    assert vocabulary.keeping_padding(padded)(257, run) == 512


def loaded(folder: Path, rows: int) -> tuple[list[list[float]], list[str]]:
    """Return a table of these rows, of a checkpoint with other ones, and what is logged."""
    initialize_megatron(2)
    half = torch.zeros(rows // 2, 2)
    cut = 0, parallel_state.get_tensor_model_parallel_rank(), 2
    table = ShardedTensor.from_rank_offsets("table", half, cut, allow_shape_mismatch=True)
    others = [ShardedTensor.from_rank_offsets(name, torch.zeros(4, 3)) for name in ("new", "wide")]
    others[1].allow_shape_mismatch = others[0].allow_shape_mismatch = True
    fixed = {"others": list(others)}
    vocabulary.fill_new_rows(fixed, {"wide": (6, 2)})
    assert fixed["others"] == others
    state = {"table": table}
    with listening() as texts:
        vocabulary.fill_new_rows(state, {"table": (6, 2), "other": (1,)})
    return dist_checkpointing.load(state, str(folder))["table"].tolist(), texts


@pytest.mark.parametrize(
    ("rows", "expected", "said"),
    [
        (4, [1.0, 2, 3, 4], "to 4 rows, and to 6 in the checkpoint. The last 2 rows are dropped"),
        (6, [1.0, 2, 3, 4, 5, 6], ""),
        (10, [1.0, 2, 3, 4, 5, 6, 6, 6, 6, 6], "to 10 rows, .* The 4 new rows start as copies"),
    ],
)
def test_a_table_with_other_rows_is_loaded(tmp_path, rows, expected, said):
    saved = torch.arange(1.0, 7)[:, None].expand(6, 2).contiguous()
    state = {"table": ShardedTensor.from_rank_offsets("table", saved)}
    run_ranks(1, dist_checkpointing.save, state, str(tmp_path))
    found = run_ranks(2, loaded, tmp_path, rows)
    assert [row for half, _ in found for row in half] == [[value] * 2 for value in expected]
    texts = [text for _, texts in found for text in texts]
    assert len(texts) == bool(said)
    assert all(re.search(f"{said}.*--padded-vocab-size 6", text) for text in texts)


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_other_rows_are_read_only_where_they_may_differ(rows):
    stays = ShardedTensor.from_rank_offsets("w", torch.zeros(rows, 2))
    assert bool(tensor_sources("w", (5, 2), stays)) == (rows == 5)
