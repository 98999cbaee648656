"""Turn folders of text files into byte-level training data in Megatron's indexed format.

Every file becomes one document: its bytes (token ids 0 to 255) and an end-of-document token (256).
A hash of a file's path assigns it to train, valid or test. So the split does not depend on the
order of the files, and files that you add later do not move the others.
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
from tqdm import tqdm

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    from megatron.core.datasets.indexed_dataset import (
        IndexedDatasetBuilder,
        get_bin_path,
        get_idx_path,
    )

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
SPLITS = ("train", "valid", "test")
FILES = tuple(f"{split}.{kind}" for split in SPLITS for kind in ("bin", "idx"))
"""The files of a corpus. The last one is written last, so it marks a complete corpus."""

PARTIAL = ".partial-"
INDEX_FOLDERS = ("cache", *SPLITS)
INDEX = re.compile(r"[0-9a-f]{32}-\w+-\w+-\w+\.(npy|txt)")
"""Megatron's index files, in ``cache`` (if passed as --data-cache-path) or in Megatron's default
folders. Their names depend on the path of the data set only, so new data makes them wrong."""


class CorpusError(ValueError):
    """The corpus cannot be made; the message names the folder or file and the fix."""


def find_files(folders: list[Path], suffix: str, exclude: set[str]) -> Iterator[tuple[str, Path]]:
    """Yield (path relative to its folder, path) of each text file below ``folders``, sorted."""
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
    """Return the split of the file ``name``; the percentages hold on average over many files."""
    percent = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % 100
    if percent < valid_percent:
        return "valid"
    return "test" if percent < valid_percent + test_percent else "train"


def deal(names: list[str], valid_percent: int, test_percent: int) -> dict[str, str]:
    """Assign every file to a split; each split gets at least one file."""
    splits = {name: split_of(name, valid_percent, test_percent) for name in names}
    for index, split in enumerate(SPLITS):
        if split not in splits.values():
            splits[names[index]] = split
    return splits


def check_out(out: Path, folders: list[Path], files: list[Path]) -> None:
    """Raise CorpusError if ``out`` contains anything but a corpus, or overlaps with the input."""
    for folder in folders:
        if folder.resolve().is_relative_to(out):
            raise CorpusError(f"--out {out}: is or holds the input {folder}. Name another folder.")
    if not out.exists():
        return
    if not out.is_dir():
        raise CorpusError(f"--out {out}: is not a folder. Name a new or existing folder.")
    names = {path.name for path in out.iterdir() if not path.name.startswith(PARTIAL)}
    if others := sorted(names.difference(FILES, INDEX_FOLDERS)):
        raise CorpusError(
            f"--out {out}: holds {others[0]!r}, which is not part of a corpus. Name another folder."
        )
    if own := [path for path in files if path.resolve().is_relative_to(out)]:
        raise CorpusError(
            f"--out {out}: contains the input file {own[0].name}. Name a folder outside of the "
            "input, or skip this one with --exclude."
        )


@contextlib.contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder; its files are moved to ``folder`` if the block succeeds."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=PARTIAL, dir=folder) as partial:
        yield Path(partial)
        # without its last file a corpus is incomplete, so nobody reads old and new files mixed
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
    """Write ``out/{train,valid,test}.{bin,idx}`` and return the number of tokens per split."""
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
            raise CorpusError(f"The {split} split is empty. Add more text files.")
        builder.finalize(get_idx_path(prefixes[split]))
    return tokens


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="folders of text files (recursive)")
    text = (
        "folder for the three data sets; it may be new, empty or contain an earlier corpus, which "
        "is replaced together with Megatron's index files"
    )
    parser.add_argument("--out", required=True, type=Path, help=text)
    parser.add_argument("--suffix", default=".txt", help="suffix of files to read (default: .txt)")
    parser.add_argument("--exclude", nargs="*", default=[], help="names of folders to skip")
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
                f"{where}: only {len(files)} files end in {args.suffix!r}, and each of the "
                f"{len(SPLITS)} splits needs one. Name another folder or another --suffix."
            )
        splits = deal([name for name, _ in files], *shares)
        with appearing_whole(out) as folder:
            tokens = write_corpus(files, folder, splits)
    except CorpusError as error:
        print(f"prepare_corpus: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        place, hint = error.filename or out, "Name another folder, or change its permissions"
        print(f"prepare_corpus: {place}: {error.strerror}. {hint}.", file=sys.stderr)
        return 2
    sizes = ", ".join(f"{split} {count:,}" for split, count in tokens.items())
    print(f"Wrote {args.out}: {sizes} tokens from {len(files):,} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
