"""Which source each value of state is read from, and what happens to those a checkpoint lacks."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import STEP
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.saved_state import MAINS, Owner, Shapes, Source, Value

_SHOWN = 12


@dataclass(frozen=True)
class Policy:
    """What may differ between a checkpoint and the run that loads it.

    Attributes:
        fresh: Kinds of state that may be missing; they start fresh.
        momentum_from_adam: Whether Adam's first moment serves as momentum where there is none.
    """

    fresh: frozenset[str] = frozenset()
    momentum_from_adam: bool = False


class Index:
    """The kinds of state that a checkpoint has, by the parameter they belong to.

    Args:
        shapes: Keys and shapes of the checkpoint's tensors and objects.

    Attributes:
        has_buckets: Whether state of some parameters lies in buckets.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._kinds: dict[str, set[str]] = {}
        self.has_buckets = False
        for key in shapes:
            parts = split_key(key)
            if parts is not None and parts.kind is None:
                self.has_buckets |= parts.name.startswith("distributed.")
            elif parts is not None and not parts.of_matrix:
                self._kinds.setdefault(parts.name, set()).add(str(parts.kind))

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def kinds(self, names: Iterable[str]) -> set[str]:
        """Return the kinds of state that all of ``names`` have."""
        found = [self._kinds.get(name, set()) for name in names]
        return set.intersection(*found) if found else set()


@dataclass
class Reading:
    """Chooses a source for every value, and collects what to say about it.

    Attributes:
        policy: What may differ.
        chosen: Value, by its place in what is asked for, to its source.
    """

    policy: Policy
    chosen: dict[int, Source] = field(default_factory=dict)
    _missing: list[str] = field(default_factory=list)
    _notes: dict[str, list[str]] = field(default_factory=dict)

    def choose(
        self, owner: Owner, values: Mapping[int, Value], shapes: Shapes, there: Collection[str]
    ) -> None:
        """Choose for all values of one parameter, or of one rank's part of it.

        Args:
            owner: The parameter.
            values: Its values by place.
            shapes: What the checkpoint has.
            there: Kinds of state that it has of this parameter.
        """
        for place, value in values.items():
            for source in value.sources:
                if source.is_in(shapes) and (
                    self.policy.momentum_from_adam or not source.from_adam
                ):
                    self.chosen[place] = source
                    if source.note:
                        self._note(source.note, owner.name)
                    break
        # steps are also counted for all parameters together
        wanted = {value.kind for value in values.values()} - MAINS - {STEP}
        others = set(there) - MAINS - {STEP}
        found = {values[place].kind for place in values if place in self.chosen}
        another_optimizer = bool(others) and not (others | found) & wanted
        for place, value in values.items():
            if place in self.chosen or value.is_count:
                continue
            if value.kind in MAINS:
                self._note("main weights are those of the model", owner.name)
            elif another_optimizer or value.kind in self.policy.fresh:
                has = ", ".join(sorted(others)) or "none"
                self._note(f"{value.kind} starts fresh (the checkpoint has: {has})", owner.name)
            else:
                self._missing.append(f"{owner.name}: {value.kind}")

    def check(self, *, other_buckets: bool) -> None:
        """Raise if state is missing that nobody said may be.

        Args:
            other_buckets: Whether the checkpoint has buckets that are not this run's.

        Raises:
            ConfigurationError: With the parameters and what they lack.
        """
        if self._missing:
            raise missing_state(self._missing, other_buckets=other_buckets)

    def lines(self) -> list[str]:
        """Return what differs from the checkpoint, a line for each difference."""
        return [
            f"{note}: {len(names)} parameter(s): {shortened(names)}"
            for note, names in self._notes.items()
        ]

    def _note(self, note: str, name: str) -> None:
        names = self._notes.setdefault(note, [])
        if name not in names[-1:]:
            names.append(name)


def missing_state(missing: list[str], *, other_buckets: bool = False) -> ConfigurationError:
    """Return the error for state that a checkpoint lacks, given as "parameter: kind"."""
    kinds = sorted({item.rpartition(": ")[2] for item in missing})
    rule = "must hold this state of the optimizer, and does not"
    if other_buckets:
        rule += (
            "; what it has by bucket (dp_reshardable) is of another tensor or pipeline "
            "parallelism, or of other buckets, and can be loaded at the layout that wrote it"
        )
    return ConfigurationError(
        "checkpoint",
        shortened(missing),
        rule,
        "Load a checkpoint of this optimizer (where it belongs to tensor-parallel slabs, one of as "
        "many), or say what may start fresh: "
        f"--checkpoint-fresh-state {' '.join(kinds)} (checkpoint_fresh_state={kinds})",
    )


def shortened(names: list[str]) -> str:
    """Return the first of many names."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
