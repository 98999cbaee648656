"""Choose the source of each state value, and decide what happens if a checkpoint lacks it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import FIRST_MOMENT, MOMENT2, MOMENTUM, STEP
from megatron_eopt.checkpoint.contents import Contents
from megatron_eopt.checkpoint.saved_state import MAINS, Source, Value

_SHOWN = 12

MAXIMA = frozenset({"max_exp_avg_sq"})
"""Running maxima, which may start later than the moment that they are maxima of."""

_MAY_BE_YOUNGER = MAXIMA | {MOMENT2}
"""Kinds that may start fresh alone: maxima, and the second moment that counts its own steps."""


@dataclass(frozen=True)
class Policy:
    """What may differ: ``fresh`` kinds may be missing; momentum may be Adam's first moment."""

    fresh: frozenset[str] = frozenset()
    momentum_from_adam: bool = False

    def __or__(self, other: "Policy") -> "Policy":
        """Return a policy that allows what either of the two allows."""
        meant = self.momentum_from_adam or other.momentum_from_adam
        return Policy(self.fresh | other.fresh, meant)


def begin_together(kinds: Collection[str], lacking: Collection[str]) -> set[str]:
    """Return the kinds of a parameter's state that start fresh if a checkpoint lacks some of them.

    That is all of them, because moments belong together and to one step count.
    """
    return set(lacking if set(lacking) <= _MAY_BE_YOUNGER else kinds)


class Reading:
    """Chooses a source for each requested value, by its index among the requests.

    Collects the state that is missing, as "parameter: kind", and lines for the log.
    """

    def __init__(self, policy: Policy, contents: Contents, *, has_stepped: bool) -> None:
        self.chosen: dict[int, Source] = {}
        self._has_stepped = has_stepped
        self._policy = policy
        self._contents = contents
        self._missing: list[str] = []
        self._fresh: list[str] = []
        self._notes: dict[str, list[str]] = {}

    def choose(self, values: Mapping[int, Value]) -> None:
        """Choose the sources of all values of one parameter."""
        meant = self._policy.momentum_from_adam
        chosen = {
            place: source
            for place, value in values.items()
            if (source := value.source_in(self._contents, momentum_from_adam=meant)) is not None
        }
        # step counts may be missing, because the checkpoint also has one for all parameters
        wanted = {value.kind for value in values.values()} - MAINS - {STEP}
        there = set(self._kinds_there(values, chosen)) - MAINS - {STEP}
        found = {values[place].kind for place in chosen}
        lacking = {value.kind for place, value in values.items() if place not in chosen} & wanted
        fresh: set[str] = set()
        if there and not (there | found) & wanted:
            fresh = lacking  # the parameter had another optimizer
        elif lacking <= self._policy.fresh:
            fresh = begin_together(wanted, lacking)
        has = ", ".join(sorted(there)) or "none"
        for place, value in values.items():
            source = None if value.is_count and fresh else chosen.get(place)
            if value.kind in fresh:
                self._note(f"{value.kind} starts fresh (the checkpoint has: {has})", value)
                self._fresh.append(f"{value.where.space.name}: {value.kind}")
            elif source is not None:
                self.chosen[place] = source
                if source.from_adam:
                    self._note(f"{MOMENTUM} starts as Adam's {FIRST_MOMENT}", value)
            elif value.kind in MAINS:
                self._note("main weights are copied from the model's weights", value)
            elif not value.is_count:
                self._missing.append(f"{value.where.space.name}: {value.kind}")

    def lines(self) -> list[str]:
        """Return a line for each difference from the checkpoint."""
        return [
            f"{note}: {len(names)} parameter(s): {shortened(names)}"
            for note, names in self._notes.items()
        ]

    def refuse(self) -> None:
        """Raise a ConfigurationError if state is missing, or should start fresh after a step."""
        if self._missing:
            raise missing_state(self._missing, by_bucket=bool(self._contents.in_buckets))
        if self._fresh and self._has_stepped:
            rule = "is missing, but the optimizer has stepped and would not start fresh"
            way_out = "Build the optimizer again before the load"
            raise ConfigurationError("checkpoint", shortened(self._fresh), rule, way_out)

    def _kinds_there(
        self, values: Mapping[int, Value], chosen: Mapping[int, Source]
    ) -> Collection[str]:
        """Return the kinds of state that a checkpoint has for a parameter."""
        where = next(iter(values.values())).where
        if self._contents.kinds:
            return self._contents.kinds_of(where.space.keys, where.space.places)
        # a rank that owns a matrix but stores no part of it does not know the bucket
        is_known = any(source.bucket is not None for source in chosen.values())
        is_known |= all(value.where.stored is None for value in values.values())
        return self._contents.in_buckets if is_known else set()

    def _note(self, note: str, value: Value) -> None:
        names = self._notes.setdefault(note, [])
        if value.where.space.name not in names[-1:]:
            names.append(value.where.space.name)


def missing_state(missing: list[str], *, by_bucket: bool = False) -> ConfigurationError:
    """Return the error for ``missing`` state, each as "parameter: kind".

    ``by_bucket``: whether the checkpoint has state by bucket.
    """
    kinds = sorted({item.rpartition(": ")[2] for item in missing})
    rule = "must hold this state of the optimizer, but does not"
    if by_bucket:
        rule += (
            "; its state by bucket (dp_reshardable) loads only with the same tensor and pipeline "
            "parallelism and the same buckets. With these, load it and save it by parameter "
            "(--dist-ckpt-optim-fully-reshardable)"
        )
    return ConfigurationError(
        "checkpoint",
        shortened(list(dict.fromkeys(missing))),
        rule,
        "Load a checkpoint of this optimizer (with the same tensor-parallel size if its keys end "
        "in .tp...of...), load no optimizer state (--no-load-optim), or let this state start "
        f"fresh: --checkpoint-fresh-state {' '.join(kinds)} (checkpoint_fresh_state={kinds})",
    )


def shortened(names: list[str]) -> str:
    """Join names, at most 12 of them."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
