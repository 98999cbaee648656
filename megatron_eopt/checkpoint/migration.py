"""Which source each value of state is read from, and what happens to those a checkpoint lacks."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import FIRST_MOMENT, MOMENT2, MOMENTUM, NO_MUON_ATTRIBUTE, STEP
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.saved_state import MAINS, Shapes, Source, Value

_SHOWN = 12

SLAB = re.compile(r"\.tp\d+of\d+$")
"""At the end of names of matrices of which each tensor-parallel rank has its own."""

MAY_BE_YOUNGER = frozenset({MOMENT2, "max_exp_avg_sq"})
"""Kinds of state that may begin later than others: that which counts its own steps, and maxima."""


@dataclass(frozen=True)
class Policy:
    """What may differ: kinds that start fresh if missing, and momentum from Adam's first moment."""

    fresh: frozenset[str] = frozenset()
    momentum_from_adam: bool = False

    def __or__(self, other: "Policy") -> "Policy":
        """Return what one of the two allows."""
        meant = self.momentum_from_adam or other.momentum_from_adam
        return Policy(self.fresh | other.fresh, meant)


def kinds_by_parameter(shapes: Shapes) -> tuple[dict[str, set[str]], bool]:
    """Return the kinds of state of each parameter, and whether some lies in buckets."""
    parts = [found for key in shapes if (found := split_key(key)) is not None]
    kinds: dict[str, set[str]] = {}
    for found in parts:
        if found.kind is not None and not found.of_matrix:
            kinds.setdefault(found.name, set()).add(found.kind)
    by_bucket = any(p.kind is None and p.name.startswith("distributed.") for p in parts)
    return kinds, by_bucket


def matrices_by_place(shapes: Shapes) -> dict[str, set[int]]:
    """Return the numbers of the matrices of which there is state of their own, by parameter."""
    found: dict[str, set[int]] = {}
    for key in shapes:
        parts = split_key(key)
        if parts is not None and parts.of_matrix and parts.kind != STEP:
            name, _, number = SLAB.sub("", parts.name).rpartition(".")
            if number.isdecimal():
                found.setdefault(name, set()).add(int(number))
    return found


@dataclass
class Reading:
    """Chooses a source for every value, by its place in what is asked for.

    It collects state that nobody said may be missing, as "parameter: kind", and what else to say.
    """

    policy: Policy
    matrices: Mapping[str, set[int]] = field(default_factory=dict)  # :func:`matrices_by_place`
    chosen: dict[int, Source] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)  # parameters that a module took from Muon
    _notes: dict[str, list[str]] = field(default_factory=dict)

    def choose(self, values: Mapping[int, Value], shapes: Shapes, there: Collection[str]) -> None:
        """Choose for all values of a parameter, of which the checkpoint has the kinds ``there``."""
        # a weight that was split otherwise has other matrices, though some of a shape and name
        other_matrices = any(
            value.is_of_another_matrix(shapes) or self._is_split_otherwise(value)
            for value in values.values()
        )
        for place, value in values.items():
            if other_matrices and value.kept is not None:
                continue
            for source in value.sources:
                meant = self.policy.momentum_from_adam or not source.from_adam
                if meant and source.is_in(shapes):
                    self.chosen[place] = source
                    if source.from_adam:
                        self._note(f"{MOMENTUM} is taken from {FIRST_MOMENT}", value)
                    break
        # steps are also counted for all parameters together
        wanted = {value.kind for value in values.values()} - MAINS - {STEP}
        others = set(there) - MAINS - {STEP}
        found = {values[place].kind for place in values if place in self.chosen}
        another_optimizer = bool(others) and not (others | found) & wanted
        lacking = {v.kind for place, v in values.items() if place not in self.chosen} & wanted
        apart = lacking - MAY_BE_YOUNGER
        let_go: set[str] = set()
        if not another_optimizer and apart and lacking <= self.policy.fresh:
            # moments without each other, or with another count of steps, are no moments
            let_go = found & wanted
            self._let_go(values, let_go, apart)
        elif found & others and others - wanted:
            has = ", ".join(sorted(others))
            kinds = ", ".join(sorted(found & others))
            self._note(f"{kinds} goes on as it is (the checkpoint has: {has})", *values.values())
        for place, value in values.items():
            if place in self.chosen or value.is_count or value.kind in let_go:
                continue
            if value.kind in MAINS:
                self._note("main weights are those of the model", value)
            elif MOMENTUM in others - wanted and _is_excluded(value) and not self._is_fresh(value):
                self.excluded.append(value.where.space.name)
            elif another_optimizer or self._is_fresh(value):
                has = ", ".join(sorted(others)) or "none"
                self._note(f"{value.kind} starts fresh (the checkpoint has: {has})", value)
            else:
                self.missing.append(f"{value.where.space.name}: {value.kind}")

    def lines(self) -> list[str]:
        """Return what differs from the checkpoint, a line for each difference."""
        return [
            f"{note}: {len(names)} parameter(s): {shortened(names)}"
            for note, names in self._notes.items()
        ]

    def refuse(self, *, other_buckets: bool = False) -> None:
        """Raise a ConfigurationError if state is missing; see :func:`missing_state`.

        A module that marks its weight with ``use_muon = False`` in one release of megatron-core and
        not in another takes it from Muon; what becomes of the momentum is not decided here.
        """
        if self.excluded:
            raise ConfigurationError(
                "checkpoint",
                shortened(list(dict.fromkeys(self.excluded))),
                f"has the {MOMENTUM} of Muon for these, which are marked with "
                f"{NO_MUON_ATTRIBUTE}=False now and go to another optimizer",
                "Go on with Muon (muon_orthogonalize_excluded=True, --muon-orthogonalize-excluded),"
                " or name the state that may start fresh: --checkpoint-fresh-state "
                f"{FIRST_MOMENT} exp_avg_sq",
            )
        if self.missing:
            raise missing_state(self.missing, other_buckets=other_buckets)

    def _let_go(self, values: Mapping[int, Value], kinds: set[str], apart: set[str]) -> None:
        """Let what was found of a parameter begin anew, too, with its counts of steps."""
        others = ", ".join(sorted(apart))
        for place, value in values.items():
            if value.is_count or value.kind in kinds:
                self.chosen.pop(place, None)
            if value.kind in kinds:
                note = f"{value.kind} starts fresh, as it means nothing without {others}"
                self._note(note, value)

    def _is_split_otherwise(self, value: Value) -> bool:
        shard = value.where.shard
        there = self.matrices.get(value.where.space.name)
        return there is not None and shard is not None and there != set(range(len(shard.layouts)))

    def _is_fresh(self, value: Value) -> bool:
        return value.kind in self.policy.fresh

    def _note(self, note: str, *values: Value) -> None:
        names = self._notes.setdefault(note, [])
        for value in values:
            name = value.where.space.name
            if name not in names[-1:]:
                names.append(name)


def _is_excluded(value: Value) -> bool:
    stored = value.where.stored
    return stored is not None and getattr(stored.param, NO_MUON_ATTRIBUTE, None) is False


def missing_state(missing: list[str], *, other_buckets: bool = False) -> ConfigurationError:
    """Return the error for state, as "parameter: kind", that a checkpoint lacks.

    It may have ``other_buckets``, which are not this run's.
    """
    kinds = sorted({item.rpartition(": ")[2] for item in missing})
    rule = "must hold this state of the optimizer, and does not"
    if other_buckets:
        rule += (
            "; what it has by bucket (dp_reshardable) is of another tensor or pipeline "
            "parallelism, or of other buckets, and can be loaded at the layout that wrote it"
        )
    return ConfigurationError(
        "checkpoint",
        shortened(list(dict.fromkeys(missing))),
        rule,
        "Load a checkpoint of this optimizer (where it belongs to tensor-parallel slabs, one of as "
        "many), or say what may start fresh: "
        f"--checkpoint-fresh-state {' '.join(kinds)} (checkpoint_fresh_state={kinds})",
    )


def shortened(names: list[str]) -> str:
    """Return the first of many names."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
