"""Turn folders of text files into byte-level training data in Megatron's indexed format.

Every file becomes one document: its bytes (token ids 0 to 255) and an end-of-document token (256).
Files are dealt to train, valid and test by a hash of their path, so the split never depends on the
order of a directory listing and adding files moves none of the others.
"""

import argparse
import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from tqdm import tqdm

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
SPLITS = ("train", "valid", "test")
FILES = tuple(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx"))
"""What a corpus consists of. With the last one it is whole."""

PARTIAL = ".partial-"
INDEX_FOLDERS = ("cache", *SPLITS)
INDEX = re.compile(r"[0-9a-f]{32}-\w+-\w+-\w+\.(npy|txt)")
"""Megatron's index of a data set, below the folder ``cache`` that our documents name or ``train``,
its own choice. It goes by the data set's path, and is wrong once there are other data."""


class CorpusError(ValueError):
    """A folder from which no corpus can be made."""


def find_files(folders: list[Path], suffix: str, exclude: set[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path relative to its folder, path) of the text files below ``folders``, in order."""
    for folder in folders:
        if not folder.is_dir():
            raise CorpusError(f"{folder}: is not a folder. Name a folder of text files.")
        if not os.access(folder, os.R_OK | os.X_OK):
            raise CorpusError(f"{folder}: cannot be read. Check its permissions.")
        for path in sorted(folder.rglob(f"*{suffix}")):
            relative = path.relative_to(folder)
            if path.is_file() and exclude.isdisjoint(relative.parts):
                yield relative.as_posix(), path


def split_of(name: str, valid_percent: int, test_percent: int) -> str:
    """Return the split of the file ``name``; the shares hold on average over many files."""
    percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % 100
    if percent < valid_percent:
        return "valid"
    return "test" if percent < valid_percent + test_percent else "train"


def deal(names: list[str], valid_percent: int, test_percent: int) -> dict[str, str]:
    """Deal every file to a split; with few files, each split still gets at least one."""
    splits = {name: split_of(name, valid_percent, test_percent) for name in names}
    for index, split in enumerate(SPLITS):
        if split not in splits.values():
            splits[names[index]] = split
    return splits


def check_out(out: Path, folders: list[Path], files: list[Path]) -> None:
    """Refuse an output folder that has more than a corpus, or whose files are input themselves."""
    for folder in folders:
        if folder.resolve().is_relative_to(out):
            raise CorpusError(f"--out {out}: is or holds the input {folder}. Name another folder.")
    if not out.exists():
        return
    if not out.is_dir():
        raise CorpusError(f"--out {out}: is not a folder. Name one, or one to be made.")
    names = {path.name for path in out.iterdir() if not path.name.startswith(PARTIAL)}
    if others := sorted(names.difference(FILES, INDEX_FOLDERS)):
        raise CorpusError(
            f"--out {out}: holds {others[0]!r}, which is no part of a corpus. Name another folder."
        )
    if own := [path for path in files if path.resolve().is_relative_to(out)]:
        raise CorpusError(
            f"--out {out}: {own[0].name} in it would be read as text. Name a folder outside of the "
            "input, or leave this one out with --exclude."
        )


@contextlib.contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder to write a corpus to, whose files ``folder`` gets if nothing goes wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as partial:
        yield Path(partial)
        # first, so that whoever looks for it never finds old and new files mixed
        (folder / FILES[-1]).unlink(missing_ok=True)
        for name in INDEX_FOLDERS:
            for path in (folder / name).rglob("*"):
                if INDEX.fullmatch(path.name):
                    path.unlink()
        for name in FILES:
            Path(partial, name).replace(folder / name)


def write_corpus(
    files: list[tuple[str, Path]], out: Path, splits: dict[str, str]
) -> dict[str, int]:
    """Write ``out/{train,valid,test}.{bin,idx}`` and return the number of tokens of each."""
    prefixes = {split: str(out / split) for split in SPLITS}
    builders = {
        split: IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
        for split, prefix in prefixes.items()
    }
    tokens = dict.fromkeys(SPLITS, 0)
    for name, path in tqdm(files, desc="Reading text", unit="file", disable=None):
        try:
            data = path.read_bytes()
        except OSError as error:
            raise CorpusError(f"{path}: cannot be read ({error.strerror}).") from error
        if not data:
            continue
        document = np.append(np.frombuffer(data, dtype=np.uint8).astype(np.uint16), END_OF_DOCUMENT)
        builders[splits[name]].add_document(document, [len(document)])
        tokens[splits[name]] += len(document)
    for split, builder in builders.items():
        if not tokens[split]:
            raise CorpusError(f"nothing to read for the {split} split; give more text.")
        builder.finalize(get_idx_path(prefixes[split]))
    return tokens


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of text files, read deeply")
    text = (
        "folder for the three data sets; those in it are replaced, Megatron's indices of them are "
        "removed, and one that holds anything else is refused"
    )
    parser.add_argument("--out", required=True, type=Path, help=text)
    parser.add_argument("--suffix", default=".txt", help="which files to read (default: .txt)")
    parser.add_argument("--exclude", nargs="*", default=[], help="folder names to leave out")
    parser.add_argument("--valid-percent", type=int, default=5, help="share of files (default: 5)")
    parser.add_argument("--test-percent", type=int, default=5, help="share of files (default: 5)")
    args = parser.parse_args(arguments)
    shares = (args.valid_percent, args.test_percent)
    if min(shares) < 1 or sum(shares) > 99:
        parser.error("--valid-percent and --test-percent: at least 1 each, at most 99 together")
    out = args.out.resolve()
    try:
        files = list(find_files(args.folders, args.suffix, set(args.exclude)))
        check_out(out, args.folders, [path for _, path in files])
        if len(files) < len(SPLITS):
            where = ", ".join(map(str, args.folders))
            raise CorpusError(
                f"{where}: {len(files)} files end in {args.suffix!r}, at least {len(SPLITS)} are "
                "needed (one for each split). Name another folder or another --suffix."
            )
        splits = deal([name for name, _ in files], *shares)
        with appearing_whole(out) as folder:
            tokens = write_corpus(files, folder, splits)
    except CorpusError as error:
        print(f"prepare_corpus: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place, way_out = error.filename or out, "Name another folder, or change its permissions"
        print(f"prepare_corpus: {place}: {error.strerror}. {way_out}.", file=sys.stderr)
        return 2
    sizes = ", ".join(f"{split} {count:,}" for split, count in tokens.items())
    print(f"Wrote {args.out}: {sizes} tokens from {len(files):,} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
