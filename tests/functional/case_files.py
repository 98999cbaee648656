"""Case records: what to train, on how many ranks, and what its results are compared with.

A file in ``cases/`` maps names to records. Whatever is not understood is an error: a misspelt key
must not turn a check off.
"""

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

FOLDER = Path(__file__).with_name("cases")

Kind = Literal["golden", "resume", "parity"]
Environment = Literal["cpu_gloo", "gpu_nccl"]
Trainer = Literal["ours", "stock"]


class CaseError(ValueError):
    """A record that cannot be understood; the message names file, case and key."""


@dataclass(frozen=True)
class Variant:
    """One of the runs that a parity case compares.

    Attributes:
        flags: Further flags of the training script.
        trainer: With this package's optimizers, or as megatron-core comes.
    """

    flags: tuple[str, ...] = ()
    trainer: Trainer = "ours"


@dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: Unique among all files.
        kind: ``golden``: compared with recorded values. ``resume``: half the steps, saved and gone
            on with, equal all of them in one go. ``parity``: variants equal the first of them.
        flags: Flags of the training script beyond those that all cases share.
        ranks: Number of processes.
        long: Whether only the long tier runs it.
        environments: Where the case can run.
        tolerances: Largest relative differences by metric, where the measured spread does not tell
            (parity only).
        why: Why it does not.
        notices: Flags of a run that is a little wrong and must not pass (golden only).
        resumed_flags: Flags of the second half of the steps, if it is to run otherwise.
        variants: The runs of a parity case by name; the first is what the others must equal.
    """

    name: str
    kind: Kind
    flags: tuple[str, ...]
    ranks: int = 2
    long: bool = False
    environments: tuple[Environment, ...] = ("cpu_gloo",)
    tolerances: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    notices: tuple[str, ...] = ()
    resumed_flags: tuple[str, ...] = ()
    variants: Mapping[str, Variant] = field(default_factory=dict)

    @property
    def is_recorded(self) -> bool:
        """Whether there is a file of recorded values or their spread."""
        return self.kind != "resume" or bool(self.resumed_flags)

    def fingerprint(self, shared: list[str]) -> str:
        """Return a hash of all that decides what is recorded of the case.

        Args:
            shared: What that is for all cases.
        """
        first = next(iter(self.variants.values()), Variant())
        record = json.dumps([shared, self.flags, self.ranks, self.kind, asdict(first)])
        return hashlib.sha256(record.encode()).hexdigest()[:16]


_KEYS = {item.name for item in fields(Case)} - {"name"}
_KEYS_OF_ONE_KIND = {
    "environments": "golden",
    "tolerances": "parity",
    "notices": "golden",
    "resumed_flags": "resume",
    "variants": "parity",
}


class _Loader(yaml.SafeLoader):
    """Refuses keys that are given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise CaseError(f"{node.start_mark.name}:{line}: {key.value} is given twice")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_cases(folder: Path = FOLDER) -> dict[str, Case]:
    """Return all cases by name.

    Raises:
        CaseError: If a record has unknown keys, lacks one, or holds a value of the wrong kind; or
            if two cases have one name.
    """
    cases: dict[str, Case] = {}
    for path in sorted(folder.glob("*.yaml")):
        for case in _cases_of(path):
            if case.name in cases:
                raise CaseError(f"{path.name}: {case.name} is in another file too")
            cases[case.name] = case
    return cases


def _cases_of(path: Path) -> Iterator[Case]:
    with path.open(encoding="utf-8") as file:
        try:
            records = yaml.load(file, _Loader)
        except yaml.YAMLError as error:
            raise CaseError(f"{path.name}: {error}") from error
    _check(isinstance(records, dict), path.name, "must map names to records")
    for name, record in records.items():
        yield _case(f"{path.name}: {name}", str(name), record)


def _case(where: str, name: str, record: Any) -> Case:
    _check(isinstance(record, dict), where, "must be a mapping")
    unknown = set(record) - _KEYS
    _check(not unknown, where, f"unknown keys {sorted(map(str, unknown))}; known: {sorted(_KEYS)}")
    for key in ("kind", "flags"):
        _check(key in record, where, f"lacks {key!r}")
    kind = record["kind"]
    _check(kind in get_args(Kind), where, f"kind {kind!r} is none of {get_args(Kind)}")
    for key, only in _KEYS_OF_ONE_KIND.items():
        _check(kind == only or key not in record, where, f"{key!r} is for {only} cases")
    values = {key: _CONVERT[key](f"{where}: {key}", value) for key, value in record.items()}
    case = Case(name=name, **values)
    _check(bool(case.why) == bool(case.tolerances), where, "'tolerances' go with 'why'")
    if kind == "parity":
        _check(len(case.variants) > 1, where, "'variants' must hold two or more")
    return case


def _flags(where: str, value: Any) -> tuple[str, ...]:
    _check(isinstance(value, str), where, f"must be text, not {value!r}")
    return tuple(shlex.split(value))


def _text(where: str, value: Any) -> str:
    _check(isinstance(value, str) and bool(value.strip()), where, "must be text")
    return str(value).strip()


def _ranks(where: str, value: Any) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    _check(whole and value >= 1, where, f"must be a positive whole number, not {value!r}")
    return int(value)


def _truth(where: str, value: Any) -> bool:
    _check(isinstance(value, bool), where, f"must be true or false, not {value!r}")
    return bool(value)


def _environments(where: str, value: Any) -> tuple[Environment, ...]:
    known = get_args(Environment)
    good = isinstance(value, list) and bool(value) and all(item in known for item in value)
    _check(good, where, f"must be a list out of {known}, not {value!r}")
    return tuple(value)


def _tolerances(where: str, value: Any) -> dict[str, float]:
    from tests.functional.metrics import METRICS

    _check(isinstance(value, dict) and bool(value), where, "must map metrics to numbers")
    for metric, number in value.items():
        _check(metric in METRICS, where, f"{metric!r} is none of {METRICS}")
        _check(isinstance(number, float) and 0 <= number < 1, where, f"{number!r} is no fraction")
    return dict(value)


def _variants(where: str, value: Any) -> dict[str, Variant]:
    _check(isinstance(value, dict), where, "must map names to runs")
    return {str(name): _variant(f"{where}.{name}", run) for name, run in value.items()}


def _variant(where: str, run: Any) -> Variant:
    _check(
        isinstance(run, dict) and set(run) <= {"flags", "trainer"}, where, "keys: flags, trainer"
    )
    trainer = run.get("trainer", "ours")
    _check(trainer in get_args(Trainer), where, f"trainer {trainer!r} is none of ours, stock")
    return Variant(_flags(f"{where}.flags", run.get("flags", "")), trainer)


_CONVERT = {
    "kind": _text,
    "flags": _flags,
    "ranks": _ranks,
    "long": _truth,
    "environments": _environments,
    "tolerances": _tolerances,
    "why": _text,
    "notices": _flags,
    "resumed_flags": _flags,
    "variants": _variants,
}


def _check(good: bool, where: str, complaint: str) -> None:
    if not good:
        raise CaseError(f"{where}: {complaint}")
