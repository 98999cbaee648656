"""Turn folders of text files into byte-level training data in Megatron's indexed format.

Every file becomes one document: its bytes (token ids 0 to 255) and an end-of-document token (256).
Files are dealt to train, valid and test by a hash of their path, so the split never depends on the
order of a directory listing and adding files moves none of the others.
"""

import argparse
import contextlib
import hashlib
import os
import shutil
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


@contextlib.contextmanager
def appearing_whole(folder: Path) -> Iterator[Path]:
    """Yield a folder to write to that takes ``folder``'s place only if nothing goes wrong."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    parser.add_argument("--out", required=True, type=Path, help="folder for the three data sets")
    parser.add_argument("--suffix", default=".txt", help="which files to read (default: .txt)")
    parser.add_argument("--exclude", nargs="*", default=[], help="folder names to leave out")
    parser.add_argument("--valid-percent", type=int, default=5, help="share of files (default: 5)")
    parser.add_argument("--test-percent", type=int, default=5, help="share of files (default: 5)")
    args = parser.parse_args(arguments)
    shares = (args.valid_percent, args.test_percent)
    if min(shares) < 1 or sum(shares) > 99:
        parser.error("--valid-percent and --test-percent: at least 1 each, at most 99 together")
    try:
        files = list(find_files(args.folders, args.suffix, set(args.exclude)))
        if len(files) < len(SPLITS):
            where = ", ".join(map(str, args.folders))
            raise CorpusError(
                f"{where}: {len(files)} files end in {args.suffix!r}, at least {len(SPLITS)} are "
                "needed (one for each split). Name another folder or another --suffix."
            )
        splits = deal([name for name, _ in files], *shares)
        with appearing_whole(args.out) as folder:
            tokens = write_corpus(files, folder, splits)
    except CorpusError as error:
        print(f"prepare_corpus: {error}", file=sys.stderr)
        return 2
    sizes = ", ".join(f"{split} {count:,}" for split, count in tokens.items())
    print(f"Wrote {args.out}: {sizes} tokens from {len(files):,} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
