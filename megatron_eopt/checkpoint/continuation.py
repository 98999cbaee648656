"""Decides which saved state a parameter's optimizer continues from, for every checkpoint format.

Note [Meaning of state]
    A saved value has a key, and a meaning that depends on the optimizer that wrote it (see
    ``meaning_of``). An optimizer continues from a value only if the meaning is its own:

    * equal meanings continue, also from another optimizer (Adam's ``exp_avg`` in Lion);
    * a sum of gradients (SGD) becomes a mean, and a mean a sum, by the factor ``1 - momentum``,
      and another optimizer's sum becomes one of the same mean;
    * if the user asks for it, Muon's momentum starts from any saved mean of gradients;
    * if nothing of another optimizer's state can be used, or if the class that wrote it is
      unknown, all state starts fresh;
    * in all other cases state is missing, which is an error unless the user names it.

Note [Outcomes]
    :meth:`LoadReport.decide` decides for every format, so one state has one outcome everywhere:

    ==========================================  ================================================
    a checkpoint has, of a key                  outcome
    ==========================================  ================================================
    its meaning, in a form that fits            loaded; a sum is converted to a mean, or back
    its meaning, in another shape, type or cut  missing; the error says how it differs
    nothing, of an optional key                 as the optimizer begins
    nothing, of a key that the user names       fresh, with what belongs to it, and a line
    nothing, or other meanings only             missing
    nothing usable, all of another optimizer,   fresh, with a line
    or of a class that is not known
    ==========================================  ================================================

    What is missing is refused before anything changes, and so is a fresh start of an optimizer that
    has stepped.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from megatron.core.utils import log_single_rank

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.log import inform
from megatron_eopt.base.names import FIRST_MOMENT, MOMENT2, MOMENTUM
from megatron_eopt.config.registry import meaning_of, name_of_class
from megatron_eopt.config.settings import RunSettings
from megatron_eopt.config.writers import MEAN, SUM, momentum_of

logger = logging.getLogger(__name__)

_SHOWN = 12

MAXIMA = frozenset({"max_exp_avg_sq"})
"""Running maxima, which may start later than the moment that they are maxima of."""

_MAY_BE_YOUNGER = MAXIMA | {MOMENT2}
"""Keys that may start fresh alone: maxima, and the second moment that counts its own steps."""


@dataclass(frozen=True)
class Policy:
    """What a load accepts: state with ``fresh`` keys may be missing, and then starts fresh.

    With ``momentum_from_adam``, Muon's momentum may start as Adam's first moment.
    """

    fresh: frozenset[str] = frozenset()
    momentum_from_adam: bool = False

    @classmethod
    def of(cls, settings: RunSettings) -> Self:
        """Return the policy that a configuration asks for."""
        fresh = frozenset(settings.config.ckpt_allow_missing_optim_state)
        return cls(fresh, settings.config.checkpoint_momentum_from_adam)

    def __or__(self, other: "Policy") -> "Policy":
        """Return a policy that allows what either of the two allows."""
        from_adam = self.momentum_from_adam or other.momentum_from_adam
        return Policy(self.fresh | other.fresh, from_adam)


@dataclass(frozen=True)
class SavedState:
    """The state that a checkpoint has of one parameter."""

    keys: frozenset[str] = frozenset()
    # optimizers that may have written it: usually one, several if the checkpoint does not say which
    optimizers: tuple[str, ...] = ()
    momentum: float | None = None  # that optimizer's, if it is known; see ``momentum_of``

    def means(self, key: str, wanted: str) -> bool:
        """Return whether ``key`` means ``wanted``, whichever of the optimizers wrote it."""
        return key in self.keys and {meaning_of(n, key) for n in self.optimizers} == {wanted}

    def is_anothers(self, reader: "Reader") -> bool:
        """Return whether another optimizer than ``reader`` has, or may have, written it."""
        return self.writer not in ("", reader.name)

    @property
    def writer(self) -> str:
        """The optimizers that may have written it, in words."""
        return " or ".join(self.optimizers)


class Reader(NamedTuple):
    """The optimizer that loads a parameter's state."""

    name: str
    momentum: float | None = None  # see ``momentum_of``

    @classmethod
    def of(cls, name: str, group: Mapping[str, Any]) -> Self:
        """Return the reader of a group's parameters, given the name or class of its optimizer."""
        return cls(name_of_class(name), momentum_of(group))


class Origin(NamedTuple):
    """Where a value is loaded from."""

    key: str  # key of the saved value
    factor: float = 1.0  # what the saved value is multiplied by


@dataclass(frozen=True)
class Continuation:
    """What happens to one parameter's state."""

    origins: dict[str, Origin]  # by key of the optimizer's state
    fresh: frozenset[str]  # keys of state that starts fresh
    missing: frozenset[str]  # keys of state for which the user has to decide


def continuation_of(
    keys: Collection[str],
    reader: Reader,
    saved: SavedState,
    policy: Policy,
    fits: Callable[[str, str], bool] = lambda key, other: True,
) -> Continuation:
    """Return where each value of a parameter's state comes from; see Note [Meaning of state].

    Args:
        keys: Keys of the optimizer's state, without main weights and step counts.
        reader: The optimizer.
        saved: What the checkpoint has of the parameter.
        policy: What the user allows.
        fits: Called as ``(key, saved_key)``; whether the saved value has the right shape.
    """
    candidates = {key: _candidates(key, reader, saved, policy) for key in keys}
    fitting = {key: [o for o in each if fits(key, o.key)] for key, each in candidates.items()}
    origins = {key: each[0] for key, each in fitting.items() if each}
    lacking = set(keys) - origins.keys()
    # state that has the right meaning and another shape is missing, not another optimizer's
    is_anothers = not any(candidates.values()) and reader.name not in saved.optimizers
    fresh: set[str] = set()
    # an optimizer was changed on purpose, so nobody needs to name its state; a checkpoint without
    # any state of the parameter is not such a case
    if saved.keys and is_anothers:
        fresh = lacking
    elif lacking <= policy.fresh:
        # all begin anew, because moments belong together and to one step count
        fresh = lacking if lacking <= _MAY_BE_YOUNGER else set(keys)
    origins = {key: origin for key, origin in origins.items() if key not in fresh}
    return Continuation(origins, frozenset(fresh), frozenset(lacking - fresh))


def _candidates(key: str, reader: Reader, saved: SavedState, policy: Policy) -> list[Origin]:
    """Return the saved values that ``key`` may continue from, the best first."""
    wanted = meaning_of(reader.name, key)
    origins = []
    if saved.means(key, wanted):
        origins.append(Origin(key, _sum_by_sum(reader, saved) if wanted == SUM else 1.0))
    elif wanted == MEAN and saved.means(key, SUM) and saved.momentum is not None:
        origins.append(Origin(key, 1 - saved.momentum))
    elif wanted == SUM and saved.means(key, MEAN) and reader.momentum is not None:
        origins.append(Origin(key, 1 / (1 - reader.momentum)))
    if key == MOMENTUM and policy.momentum_from_adam:
        # a sum is the mean over 1 - momentum, if gradients hardly change
        factor = {MEAN: 1.0, SUM: 1 / (1 - (reader.momentum or 0.0))}.get(wanted)
        if factor is not None and saved.means(FIRST_MOMENT, MEAN):
            origins.append(Origin(FIRST_MOMENT, factor))
    return origins


def _sum_by_sum(reader: Reader, saved: SavedState) -> float:
    """Return what another optimizer's sum is multiplied by, which may have dampened gradients."""
    is_known = reader.momentum is not None and saved.momentum is not None
    if not (is_known and saved.is_anothers(reader)):
        return 1.0
    return (1 - saved.momentum) / (1 - reader.momentum)  # type: ignore[operator]


class Note(NamedTuple):
    """A difference from a checkpoint, for the log."""

    text: str
    name: str | None  # the parameter; None for the whole checkpoint
    is_asked: bool = False  # whether a setting asks for it


def log_notes(notes: Iterable[Note]) -> None:
    """Log the notes of all parameters on rank 0, one line for each text."""
    names_of: dict[tuple[str, bool], dict[str, None]] = {}
    for note in notes:
        names = names_of.setdefault((note.text, note.is_asked), {})
        names |= {} if note.name is None else {note.name: None}
    for (text, is_asked), names in names_of.items():
        count = f": {len(names)} parameter(s): {shortened(list(names))}" if names else ""
        line = f"optimizer state: {text}{count}"
        if is_asked:
            inform(logger, line)
        else:
            log_single_rank(logger, logging.WARNING, line)


class LoadReport:
    """Decides about parameters, and collects notes for the log, or one error; Note [Outcomes]."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._missing: list[tuple[str, str, str]] = []  # parameter, key, and how it differs, if so
        self._fresh: list[str] = []
        self._reasons: dict[str, None] = {}  # what a checkpoint has in place of missing state
        self.notes: list[Note] = []

    def decide(
        self,
        name: str,
        reader: Reader,
        keys: Collection[str],
        saved: SavedState,
        misfit: Callable[[str, str], str | None] = lambda key, other: None,
        spare: frozenset[str] = frozenset(),
    ) -> Continuation:
        """Return where each value of a parameter's state comes from.

        Args:
            name: The parameter's.
            reader: Its optimizer.
            keys: Keys of its state, without main weights and the step count.
            saved: What the checkpoint has of the parameter.
            misfit: Called as ``(key, saved_key)``; why the saved value cannot be loaded, or None.
            spare: Keys that a checkpoint may lack.
        """
        problems: dict[str, str] = {}

        def fits(key: str, other: str) -> bool:
            problem = misfit(key, other)
            if problem is not None:
                problems[key] = problem
            return problem is None

        decided = continuation_of(keys, reader, saved, self._policy, fits)
        # what a checkpoint may lack must fit if it is there
        decided = replace(decided, missing=decided.missing - (spare - problems.keys()))
        has = ", ".join(sorted(saved.keys)) or "none"
        self._missing += [(name, key, problems.get(key, "")) for key in sorted(decided.missing)]
        if decided.missing and saved.keys and saved.is_anothers(reader):
            self._reasons[f"{has} are {saved.writer}'s"] = None
            if reader.name in saved.optimizers:
                self._reasons[f"set 'optimizer': {reader.name!r} in its group if that is so"] = None
        self._fresh += [f"{name}: {key}" for key in sorted(decided.fresh)]
        for key in sorted(decided.fresh):
            is_theirs = key in saved.keys and not _candidates(key, reader, saved, Policy())
            whose = f" of {saved.writer}" if is_theirs else ""
            self.note(f"{key} starts fresh (the checkpoint has: {has}{whose})", name)
        for key, origin in sorted(decided.origins.items()):
            times = f", times {origin.factor:.4g}" if origin.factor != 1.0 else ""
            if times or origin.key != key:
                by = f"{saved.writer}'s {origin.key}"
                self.notes.append(Note(f"{key} starts as {by}{times}", name, is_asked=True))
        return decided

    def lack(self, name: str, key: str, problem: str = "") -> None:
        """Note further missing state, or state that does not fit."""
        self._missing.append((name, key, problem))

    def note(self, note: str, name: str | None = None) -> None:
        """Note what no setting asks for, about a parameter or the whole checkpoint."""
        self.notes.append(Note(note, name))

    def refuse(self, argument: str, *, has_stepped: bool, by_bucket: bool = False) -> None:
        """Raise a ConfigurationError if state is missing, or should start fresh after a step."""
        if self._missing:
            raise missing_state(self._missing, by_bucket=by_bucket, reason="; ".join(self._reasons))
        if self._fresh and has_stepped:
            rule = "is missing, but the optimizer has stepped and would not start fresh"
            hint = "Build the optimizer again before the load"
            raise ConfigurationError(argument, shortened(self._fresh), rule, hint)


def missing_state(
    missing: Iterable[tuple[str, str, str]], *, by_bucket: bool = False, reason: str = ""
) -> ConfigurationError:
    """Return the error for missing state, each given as parameter, key, and how it differs.

    Args:
        missing: The state.
        by_bucket: Whether the checkpoint has the state in buckets of another layout.
        reason: What the checkpoint has instead.
    """
    keys = sorted({key for _, key, _ in missing})
    texts = [f"{name}: {key} {problem}".strip() for name, key, problem in missing]
    rule = "must hold this state of the optimizer, but does not"
    if reason:
        rule += f" ({reason})"
    if by_bucket:
        return in_other_buckets()
    return ConfigurationError(
        "checkpoint",
        shortened(list(dict.fromkeys(texts))),
        rule,
        "Load a checkpoint of this optimizer (with the same tensor-parallel size if its keys end "
        "in .tp...of...), load no optimizer state (--no-load-optim), or let this state start "
        f"fresh: --ckpt-allow-missing-optim-state {' '.join(keys)} "
        f"(ckpt_allow_missing_optim_state={keys})",
    )


def in_other_buckets() -> ConfigurationError:
    """Return the error for state by bucket in which the model's parameters cannot be found."""
    rule = (
        "this form of Adam's state, written without megatron-eopt, names no parameters, and those "
        "of this model, in Megatron's order, fill its buckets at no layout with this expert "
        "parallelism and evenly cut stages"
    )
    hint = (
        "Load it at that layout, also into another optimizer, and save once. That checkpoint loads "
        "at any layout"
    )
    return ConfigurationError("checkpoint", "dp_reshardable", rule, hint)


def of_other_weights(name: str) -> ConfigurationError:
    """Return the error for buckets that fit by size, but do not have the model's weights."""
    rule = f"the weights in its buckets are not those of the model, first in {name}"
    hint = (
        "Load the model's weights with the optimizer's state. If they are, load at the layout that "
        "wrote it, and save once"
    )
    return ConfigurationError("checkpoint", "dp_reshardable", rule, hint)


def shortened(names: list[str]) -> str:
    """Join names, at most 12 of them."""
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
