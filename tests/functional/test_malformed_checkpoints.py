"""Damaged checkpoints and malformed state dictionaries end in an error that explains itself."""

import functools
import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from megatron_eopt import checkpoint_files
from megatron_eopt.checkpoint_files.manifest import MANIFEST
from tests.functional.outcomes import Outcomes
from tests.harness import run_ranks
from tests.harness.scene import forget_megatron
from tests.unit.stores.full_state import Case, build, sharded, steps, unwrapped

TIMEOUT_S = 500.0
MODEL = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 16}

DAMAGES = ("truncate", "flip", "delete", "empty", "swap", "garbage", "garbage manifest", "extra")


def damage(folder: Path, chance: random.Random, kind: str) -> str:
    """Damage a file of a checkpoint; return what was done."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    if kind in ("delete", "flip"):
        # without a manifest it is another program's, and some words of a manifest do not count
        files = [item for item in files if item.name != MANIFEST]
    path = chance.choice(files)
    content = path.read_bytes()
    if kind == "truncate":
        path.write_bytes(content[: chance.randrange(len(content))])
    elif kind == "flip":
        place = chance.randrange(len(content))
        flipped = content[place] ^ (1 << chance.randrange(8))
        path.write_bytes(content[:place] + bytes([flipped]) + content[place + 1 :])
    elif kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "swap":
        other = chance.choice([item for item in files if item != path])
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "garbage":
        path.write_bytes(chance.randbytes(len(content)))
    elif kind == "garbage manifest":
        texts = ["", "[]", "null", '{"form": 1}', '{"form": 1, "files": 3, "written_by": {}}']
        texts += ['{"form": "x", "files": {}, "written_by": {}}', '{"form": 1, "files": {}']
        texts += ['{"form": 1, "files": {"a": {"size": -1}}, "written_by": {}}', "\x00"]
        texts += [json.dumps({"form": 1, "files": {"../x": {"size": 1, "sha256": "0"}}})]
        (folder / MANIFEST).write_text(chance.choice(texts))
    else:
        (folder / "__9_0.distcp").write_bytes(b"more")
    return f"{kind} {path.name}"


def load_damaged(folder: str, examples: int) -> Outcomes:
    """Damage copies of a checkpoint and load them."""
    outcomes = Outcomes()
    case = Case("muon", MODEL)
    rank = torch.distributed.get_rank()
    whole, copy = Path(folder, "whole"), Path(folder, "copy")
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    checkpoint_files.save(sharded(case, chunk, optimizer, is_loading=False), whole)
    for number in range(examples):
        what = ""
        if rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            what = damage(copy, random.Random(number), DAMAGES[number % len(DAMAGES)])
        torch.distributed.barrier()

        outcomes.add(f"{number}: {what}", lambda: load(case, chunk, optimizer, copy))
        torch.distributed.barrier()
    return outcomes


def load(case: Case, chunk: Any, optimizer: Any, folder: Path) -> None:
    loaded = checkpoint_files.load(sharded(case, chunk, optimizer, is_loading=True), folder)
    unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])


JUNK: list[Any] = [None, [], {}, 3, "x", {"optimizer": None}, {"param_groups": 3}, [None]]


def load_state_dicts(examples: int) -> Outcomes:
    """Change a place in the state dictionary of an optimizer, and load it."""
    outcomes = Outcomes()
    for storage in (True, False):
        flags = {"use_distributed_optimizer": storage}
        case = Case("muon", MODEL, ddp=flags, config=flags)
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 1)
        for number in range(examples // 2):
            chance = random.Random(number)
            state = changed(optimizer.state_dict(), chance, depth=chance.randrange(5))
            example = f"distributed {storage}, seed {number}"
            outcomes.add(example, functools.partial(optimizer.load_state_dict, state))
        forget_megatron()
    return outcomes


def changed(value: Any, chance: random.Random, depth: int) -> Any:
    """Return a copy in which one place, so deep at most, is something else or missing."""
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    if depth == 0 or not keys:
        return chance.choice(JUNK)
    copy, key = value.copy(), chance.choice(keys)
    if depth == 1 and chance.random() < 0.4:
        del copy[key]
    else:
        copy[key] = changed(value[key], chance, depth - 1)
    return copy


def test_damaged_checkpoints(tmp_path):
    for outcomes in run_ranks(2, load_damaged, str(tmp_path), 24, timeout=TIMEOUT_S):
        # a file that is not part of the checkpoint is left alone
        assert not outcomes.defects, "\n\n".join(outcomes.defects)
        assert (outcomes.refused, outcomes.trained) == (21, 3)


def test_state_dicts():
    (outcomes,) = run_ranks(1, load_state_dicts, 60, timeout=TIMEOUT_S)
    assert not outcomes.defects, "\n\n".join(outcomes.defects)
    assert outcomes.refused > 5
