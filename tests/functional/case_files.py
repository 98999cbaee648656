"""Case records: what to train, on how many ranks, and what its results are compared with.

A file in ``cases/`` maps names to records.
"""

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

FOLDER = Path(__file__).with_name("cases")

Kind = Literal["golden", "resume", "parity"]
Environment = Literal["cpu_gloo", "gpu_nccl"]
Trainer = Literal["ours", "stock"]

_FLAGS = frozenset(["flags", "notices", "resumed_flags"])


@dataclass(frozen=True)
class Variant:
    """One of the runs that a parity case compares."""

    flags: tuple[str, ...] = ()  # further flags of the training script
    trainer: Trainer = "ours"  # with this package's optimizers, or as megatron-core comes


@dataclass(frozen=True)
class Case:
    """One case.

    ``golden`` is compared with recorded values. ``resume`` goes on from a checkpoint of half the
    steps as a run in one go does. The variants of ``parity`` equal the first of them.
    """

    name: str
    kind: Kind
    flags: tuple[str, ...]  # beyond those that all cases share
    ranks: int = 2
    long: bool = False
    environments: tuple[Environment, ...] = ("cpu_gloo",)
    # largest relative differences by metric where the measured spread does not tell, and why not
    tolerances: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    notices: tuple[str, ...] = ()  # of a run that is a little wrong and must not pass
    resumed_flags: tuple[str, ...] = ()  # of the second half
    # of the checkpoint, and of those that each run that goes on is to write
    formats: tuple[str, ...] = ("torch_dist", "torch_dist")
    variants: Mapping[str, Variant] = field(default_factory=dict)

    @property
    def is_recorded(self) -> bool:
        """Whether there is a file of recorded values or their spread."""
        return self.kind != "resume" or bool(self.resumed_flags)

    def fingerprint(self, shared: list[str]) -> str:
        """Return a hash of all that decides what is recorded; ``shared`` is what all cases have."""
        first = next(iter(self.variants.values()), Variant())
        record = json.dumps([shared, self.flags, self.ranks, self.kind, asdict(first)])
        return hashlib.sha256(record.encode()).hexdigest()[:16]


def load_cases(folder: Path = FOLDER) -> dict[str, Case]:
    """Return all cases by name; a key that a record does not have is a TypeError."""
    cases: dict[str, Case] = {}
    for path in sorted(folder.glob("*.yaml")):
        for name, record in yaml.safe_load(path.read_text(encoding="utf-8")).items():
            assert name not in cases, f"{path.name}: {name} is in another file too"
            cases[name] = _case(name, record)
    return cases


def _case(name: str, record: dict[str, Any]) -> Case:
    lists = {key: tuple(record[key]) for key in ("environments", "formats") if key in record}
    runs = {key: Variant(**_split(run)) for key, run in record.get("variants", {}).items()}
    return Case(name, **{**_split(record), **lists, "variants": runs})


def _split(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose flags are lists of words."""
    return record | {key: tuple(shlex.split(record[key])) for key in _FLAGS & record.keys()}
