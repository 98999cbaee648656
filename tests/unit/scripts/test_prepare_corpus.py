"""From a folder of text files to Megatron's indexed data sets."""

import os
import runpy
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "prepare_corpus.py"


def prepare(capsys, *arguments: object) -> tuple[int, str]:
    """Call the script's ``main`` as its last line does; return its exit code and its errors."""
    main = runpy.run_path(str(SCRIPT))["main"]
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as error:
        code = error.code
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
    documents = []
    for split in ("train", "valid", "test"):
        dataset = IndexedDataset(str(out / split))
        assert len(dataset) > 0
        documents += [dataset[i].copy() for i in range(len(dataset))]
    assert all(document[-1] == 256 for document in documents)
    read = sorted(document[:-1].astype(np.uint8).tobytes() for document in documents)
    assert read == sorted(
        content for name, content in texts.items() if content and "skipped" not in name
    )
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".corpus")]


@pytest.mark.parametrize(
    ("folder", "message"),
    [("missing", "is not a folder"), ("texts/part0/empty.txt", "is not a folder")],
)
def test_a_wrong_folder_is_refused_with_its_name(capsys, tmp_path, texts, folder, message):
    code, said = prepare(capsys, tmp_path / folder, "--out", tmp_path / "corpus")
    assert code == 2
    assert str(tmp_path / folder) in said
    assert message in said
    assert "Traceback" not in said


def test_an_empty_folder_is_refused(capsys, tmp_path):
    (tmp_path / "texts").mkdir()
    code, said = prepare(capsys, tmp_path / "texts", "--out", tmp_path / "corpus")
    assert code == 2
    assert "0 files end in '.txt'" in said
    assert not (tmp_path / "corpus").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_folder_is_refused(capsys, tmp_path, texts):
    (tmp_path / "texts").chmod(0)
    code, said = prepare(capsys, tmp_path / "texts", "--out", tmp_path / "corpus")
    (tmp_path / "texts").chmod(0o755)
    assert code == 2
    assert "cannot be read" in said


def test_files_without_text_leave_the_old_corpus_alone(capsys, tmp_path, texts):
    out = tmp_path / "corpus"
    assert prepare(capsys, tmp_path / "texts", "--out", out)[0] == 0
    before = (out / "train.bin").read_bytes()
    for path in (tmp_path / "texts").rglob("*.txt"):
        path.write_bytes(b"")
    code, said = prepare(capsys, tmp_path / "texts", "--out", out)
    assert code == 2
    assert "nothing to read" in said
    assert (out / "train.bin").read_bytes() == before
