"""Which optimizer steps which parameter, as far as a checkpoint tells.

Note [Attribution]
    The formats of DTensors record the group of every parameter. ``torch_dist`` has the groups, and
    each parameter's kinds of state: an optimizer is told from these, by elimination. Where two
    optimizers keep the same kinds the names of both are given.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from megatron_eopt.base.names import FIRST_MOMENT, MOMENTUM, STEP
from megatron_eopt.checkpoint.groups import optimizers_of
from megatron_eopt.checkpoint.saved_state import MAINS
from megatron_eopt.explain.saved import Entry, Saved, Settings
from megatron_eopt.routing.groups import GROUP_ID

UNKNOWN = "not recorded"

type Kinds = frozenset[str]

_ADAM = {FIRST_MOMENT, "exp_avg_sq"}
_KEPT: Mapping[str, tuple[Collection[str], ...]] = {
    "adam": (_ADAM, _ADAM | {"max_exp_avg_sq"}),
    "lion": ({FIRST_MOMENT},),
    "sgd": (set(), {MOMENTUM}),
}
"""What element-wise optimizers keep of a parameter; others may keep anything."""


@dataclass(frozen=True)
class Parameter:
    """A parameter, or those of the same place in all layers that are saved as one tensor.

    Attributes:
        name: In the checkpoint.
        count: How many parameters it stands for.
        shape: Of one of these.
        elements: Of all these together.
        kinds: Kinds of optimizer state.
        optimizer: Name of the optimizer, or of all that it may be.
        group: Identity of its group, None where it is not recorded.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    elements: int
    kinds: Kinds
    optimizer: str
    group: str | None


def parameters_of(saved: Saved) -> list[Parameter]:
    """Return all parameters that have optimizer state."""
    model = {e.parameter: e for e in saved.entries if e.kind is None and e.parameter is not None}
    state: dict[str, list[Entry]] = {}
    for entry in saved.entries:
        if entry.kind is not None and entry.parameter is not None:
            state.setdefault(entry.parameter, []).append(entry)
    state = state or _of_buckets(saved, model)
    kinds = {name: _kinds(entries) for name, entries in state.items()}
    guessed = attribute(set(kinds.values()), saved)
    found = []
    for name, entries in state.items():
        group = saved.group_of.get(name)
        like = model.get(name) or max(entries, key=lambda e: (not e.of_matrix, e.elements))
        found.append(
            Parameter(
                name=name,
                count=math.prod(like.shape[: like.stacked]),
                shape=like.shape[like.stacked :],
                elements=_elements(entries) or like.elements,
                kinds=kinds[name],
                optimizer=guessed[kinds[name]] if group is None else name_of(group, saved),
                group=None if group is None else group.get(GROUP_ID),
            )
        )
    return found


def name_of(group: Settings, saved: Saved) -> str:
    """Return the name of a group's optimizer; what groups do not name is the run's main one."""
    (name,) = optimizers_of([group])
    return name or saved.main or UNKNOWN


def attribute(found: Collection[Kinds], saved: Saved) -> dict[Kinds, str]:
    """Return the optimizer for each set of kinds of state that parameters have, by elimination."""
    names = list(dict.fromkeys(name_of(group, saved) for group in saved.groups))
    if not names:
        # of groups without names
        names = [name for name in ("adam",) if any(its in _KEPT[name] for its in found)]
    may = {kinds: {name for name in names if _may_keep(name, kinds, saved)} for kinds in found}
    single = {name for its in may.values() if len(its) == 1 for name in its}
    settled: set[str] = set()
    while new := single - settled:
        settled |= new
        may = {
            kinds: its - new if len(its - new) and len(its) > 1 else its
            for kinds, its in may.items()
        }
        single = {name for its in may.values() if len(its) == 1 for name in its}
    return {
        kinds: " or ".join(name for name in names if name in its) or UNKNOWN
        for kinds, its in may.items()
    }


def _may_keep(name: str, kinds: Kinds, saved: Saved) -> bool:
    if name in _KEPT:
        return kinds in _KEPT[name]
    settings = [group for group in saved.groups if name_of(group, saved) == name]
    return MOMENTUM not in kinds or any("momentum" in group for group in settings)


def _kinds(entries: Iterable[Entry]) -> Kinds:
    return frozenset(str(entry.kind) for entry in entries) - MAINS - {STEP}


def _elements(entries: Iterable[Entry]) -> int:
    """Return the elements of the largest state; its parts may lie in many files."""
    sums: Counter[str] = Counter()
    for entry in entries:
        sums[str(entry.kind)] += 0 if entry.of_matrix else entry.elements
    return max(sums.values())


def _of_buckets(saved: Saved, model: Mapping[str, Entry]) -> dict[str, list[Entry]]:
    """Return the state in buckets by parameter, if they have room for the whole model."""
    sums: Counter[str] = Counter()
    for entry in saved.entries:
        if entry.kind is not None:
            sums[entry.kind] += entry.elements
    if min(sums.values(), default=0) < sum(entry.elements for entry in model.values()):
        return {}
    return {name: [replace(e, kind=kind) for kind in sums] for name, e in model.items()}
