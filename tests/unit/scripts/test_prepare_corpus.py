"""From a folder of text files to Megatron's indexed data sets."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from scripts import prepare_corpus


def prepare(capsys, *arguments: object) -> tuple[int, str]:
    """Call the script's ``main``; return its exit code and its errors."""
    code = prepare_corpus.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().err


@pytest.fixture
def texts(tmp_path) -> dict[str, bytes]:
    files = {f"part{i % 3}/file{i}.txt": f"text {i} \u00e9\n".encode() * (i + 1) for i in range(20)}
    files["skipped/file.txt"] = b"not read"
    files["part0/empty.txt"] = b""
    for name, content in files.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return files


def test_every_byte_lands_in_one_split(capsys, tmp_path, texts):
    out = tmp_path / "corpus"
    code, said = prepare(capsys, tmp_path / "texts", "--out", out, "--exclude", "skipped")
    assert code == 0, said
    splits = [IndexedDataset(str(out / split)) for split in ("train", "valid", "test")]
    assert all(len(split) > 0 for split in splits)
    documents = [split[i].copy() for split in splits for i in range(len(split))]
    assert all(document[-1] == 256 for document in documents)
    read = sorted(document[:-1].astype(np.uint8).tobytes() for document in documents)
    given = [content for name, content in texts.items() if content and "skipped" not in name]
    assert read == sorted(given)
    assert len(list(out.iterdir())) == 6


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("texts", "is or holds the input"),
        ("texts/part0/..", "is or holds the input"),
        (".", "is or holds the input"),
        ("link", "is or holds the input"),
        ("notes", "holds 'mine.md', which is not part of a corpus"),
        ("notes/mine.md", "is not a folder"),
        ("notes/mine.md/corpus", "Not a directory"),
    ],
)
def test_nothing_is_written_where_something_would_be_lost(capsys, tmp_path, texts, out, message):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.md").write_text("not to be lost")
    (tmp_path / "link").symlink_to("texts")
    before = contents(tmp_path)
    code, said = prepare(capsys, tmp_path / "texts", "--out", tmp_path / out)
    assert code == 2
    assert message in said
    assert said.count("\n") == 1
    assert contents(tmp_path) == before


def samples(corpus: Path, cache: Path | None) -> set[int]:
    """Return the tokens that Megatron reads, whose index is kept in ``cache``."""
    masks = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=4,
        blend_per_split=[([str(corpus / split)], None) for split in ("train", "valid", "test")],
        path_to_cache=cache and str(cache),
        tokenizer=SimpleNamespace(vocab_size=257, eod=256, pad=0, unique_identifiers={}),
        **dict.fromkeys(masks, False),
    )
    sizes, everywhere = [8, 1, 1], lambda: True
    train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, everywhere, config).build()
    return {int(token) for i in range(len(train)) for token in train[i]["tokens"]}


@pytest.mark.parametrize("cache", ["cache", None])
def test_megatrons_index_of_an_earlier_corpus_is_not_used(capsys, tmp_path, cache):
    texts, out = tmp_path / "texts", tmp_path / "corpus"
    texts.mkdir()
    cache = cache and out / cache
    # the index of the first has documents that the second has not
    for letter, count, length in (("a", 40, 5), ("b", 3, 200)):
        for path in texts.iterdir():
            path.unlink()
        for i in range(count):
            (texts / f"{i}.txt").write_text(letter * length)
        assert prepare(capsys, texts, "--out", out)[0] == 0
        (out / "cache").mkdir(exist_ok=True)
        (out / "cache" / "mine.txt").write_text("kept")
        assert samples(out, cache) <= {ord(letter), 256}
        assert len(list(out.rglob("*-document_index.npy"))) == 3
    assert prepare(capsys, texts, "--out", out)[0] == 0
    assert not list(out.rglob("*-document_index.npy"))
    assert (out / "cache" / "mine.txt").read_text() == "kept"
