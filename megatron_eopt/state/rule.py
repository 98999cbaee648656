"""Decides whose state continues from a checkpoint; every format asks here.

Note [Load rule]
    Each parameter group, saved or present, has a :class:`Writer`: its optimizer, and the settings
    that give its state a meaning. All state of a parameter has one outcome:

    =============================================  =============================================
    the checkpoint has, of a parameter             outcome
    =============================================  =============================================
    state of an equal writer                       continues; what is missing, or has another
                                                   shape, is an error
    state of another writer, or only state of      all starts fresh and counts from 0, and the
    other parameters                               log says so
    state of a writer that nobody can know; or of  an error
    none of this run's parameters
    =============================================  =============================================

    Errors are raised on all ranks before anything changes, also if state would start fresh in an
    optimizer that has stepped. Main weights are no optimizer state: they are found by the name of
    the parameter, else they are copies of the model's weights. A parameter's other values belong to
    the user, and are loaded with its state.
"""

import ast
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.log import warn
from megatron_eopt.base.names import MAIN_KINDS, STEP
from megatron_eopt.config.registry import name_of_class
from megatron_eopt.routing.groups import GROUP_ID

logger = logging.getLogger(__name__)

SEPARATOR = "\t"
"""Ends a saved group's identity, see ``with_names`` of groups.py."""

MEANINGS = ("maximize", "dampening", "moment2_method")
"""Settings that give the state of an optimizer its meaning."""

_OF_ANY_CLASS = frozenset(
    # torch, its implementations and schedulers, and scripts
    "params param_names lr weight_decay step foreach fused capturable differentiable initial_lr "
    "base_momentum max_momentum swa_lr name names group_name lr_scale in_rows_of_model "
    # Megatron
    "max_lr min_lr start_wd end_wd lr_mult wd_mult default_config optimizer group_id "
    "is_expert_parallel is_decoupled_lr is_vision_model_param".split()
).union(MEANINGS)  # of which older versions lack some
"""Settings that do not tell the class that wrote a group."""

KNOWN_BY_SETTINGS = (
    ("adam", "betas eps amsgrad", "decoupled_weight_decay bias_correction"),  # torch, DeepSpeed
    ("adam", "betas eps bias_correction", ""),  # Transformer Engine and apex
    ("sgd", "momentum nesterov", ""),
    ("muon", "momentum nesterov ns_coefficients eps ns_steps adjust_lr_fn", ""),  # torch
)
"""Optimizers of groups that name none: settings that they have, and settings that they may have."""


class Writer(NamedTuple):
    """The optimizer of a parameter group."""

    name: str | None  # as it is registered; None if the group names none and is not known
    settings: frozenset[str] = frozenset()  # names of its settings, without those of any class
    meaning: tuple[tuple[str, Any], ...] = ()  # values of ``MEANINGS``
    is_named: bool = True  # whether the group names it

    @classmethod
    def of(cls, group: Mapping[str, Any], cls_name: str | None = None) -> "Writer":
        """Return the writer of a group, whose class may be known otherwise."""
        named = optimizer_of(group)
        # NeMo writes megatron-core's names with a prefix
        settings = frozenset(k for k in group if k.removeprefix("pre_") not in _OF_ANY_CLASS)
        name = named or (None if cls_name is None else name_of_class(cls_name))
        for known, always, sometimes in KNOWN_BY_SETTINGS if name is None else ():
            if {*always.split()} <= settings <= {*always.split(), *sometimes.split()}:
                name = known
        # a value that was not read is None
        meaning = tuple((key, group[key]) for key in MEANINGS if group.get(key) is not None)
        return cls(name, settings, meaning, named is not None)

    def is_readers(self, reader: "Writer") -> bool | None:
        """Return whether a run's optimizer continues from this one's state; None if unknown.

        Classes with the same settings cannot be told apart, so that the reader is believed.
        """
        if self.name is None:
            return True if self.settings == reader.settings else None
        ours = dict(reader.meaning)
        return self.name == reader.name and all(ours.get(k, v) == v for k, v in self.meaning)

    @classmethod
    def parsed(cls, text: str) -> "Writer":
        """Return the writer that :meth:`__str__` has put into words."""
        name, _, meaning = text.rstrip(")").partition(" (")
        pairs = (setting.partition("=") for setting in meaning.split("; ") if setting)
        return cls(name, meaning=tuple((key, ast.literal_eval(value)) for key, _, value in pairs))

    def __str__(self) -> str:
        meaning = "; ".join(f"{key}={value!r}" for key, value in self.meaning if value)
        return f"{self.name} ({meaning})" if meaning else f"{self.name}"


def optimizer_of(group: Mapping[str, Any]) -> str | None:
    """Return the registered name of the optimizer that a group names; None if it names none."""
    identity = identity_of(group).partition("/")[0]
    named = identity or group.get("optimizer") or group.get("pre_optimizer")
    return name_of_class(str(named).removeprefix("dist_")) if named else None


def identity_of(group: Mapping[str, Any]) -> str:
    """Return a group's identity; empty if it has none."""
    return str(group.get(GROUP_ID) or "").partition(SEPARATOR)[0]


def state_kinds(kinds: Iterable[str]) -> frozenset[str]:
    """Return the kinds that the rule judges: those of state, without main weights and counts."""
    return frozenset(kinds) - MAIN_KINDS - {STEP}


type Kinds = Mapping[str, tuple[frozenset[str], frozenset[str]]]
"""By optimizer of this run: kinds of state that all its parameters have, and that any has."""


def kinds_by_optimizer(pairs: Iterable[tuple[str, tuple[str, ...]]]) -> Kinds:
    """Return the kinds of state that all parameters of an optimizer have, and that any has."""
    result: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
    for name, kinds in pairs:
        always, ever = result.get(name, (frozenset(kinds), frozenset[str]()))
        result[name] = always & {*kinds}, ever | {*kinds}
    return result


class SavedState(NamedTuple):
    """What a checkpoint has of one parameter."""

    kinds: frozenset[str] = frozenset()  # those of :func:`state_kinds`
    # who may have written it; none if the checkpoint's groups do not have the parameter
    writers: tuple[Writer, ...] = ()

    def by(self, own: Kinds) -> "SavedState":
        """Return it without those of several writers that do not write these kinds."""
        fitting = []
        for writer in self.writers:
            always, ever = own.get(writer.name or "", (frozenset(), self.kinds))
            if always <= self.kinds <= ever:
                fitting.append(writer)
        return self._replace(writers=tuple(fitting)) if fitting else self


class LoadReport:
    """The outcomes of parameters; see Note [Load rule]."""

    def __init__(self) -> None:
        self.fresh: set[str] = set()  # parameters whose state starts fresh
        self.lines: list[tuple[str, str]] = []  # what the log says, and of which parameter
        self.found = False  # whether the checkpoint has any of the parameters
        self._lacking: list[str] = []
        self._unknown: list[str] = []

    def continues(
        self,
        name: str,
        reader: Writer,
        required: Collection[str],
        misfit: Callable[[str], str | None],
        saved: SavedState,
    ) -> bool:
        """Return whether a parameter's state continues, and note its outcome.

        Args:
            name: The parameter's.
            reader: Its optimizer.
            required: Kinds that a checkpoint must have, of :func:`state_kinds`.
            misfit: Called with a kind that the checkpoint has; why its value cannot be loaded, or
                None.
            saved: What the checkpoint has.
        """
        if not (saved.writers or required):
            return True  # such as SGD without momentum
        verdicts = {writer.is_readers(reader) for writer in saved.writers}
        self.found |= bool(saved.writers and (saved.kinds or not required))
        if verdicts == {True}:
            self._lacking += [f"{name}: {text}" for text in _lacking(required, misfit, saved)]
            if reader.is_named and not all(writer.is_named for writer in saved.writers):
                text = f"the checkpoint does not say who wrote it, and is believed to be {reader}'s"
                self.note(text, name)
            return True
        if verdicts <= {False}:
            self.fresh.add(name)
            whose = " or ".join(dict.fromkeys(map(str, saved.writers)))
            lacking = "the checkpoint has none, as of a new weight or one that torch saved frozen"
            why = f"the checkpoint's is of {whose}" if whose else lacking
            self.note(f"starts fresh for {reader}: {why}", name)
            return False
        settings = sorted(set().union(*(writer.settings for writer in saved.writers)))
        names = [str(writer) for writer in saved.writers if writer.name is not None]
        self._unknown.append(f"{name}: {' or '.join(names) or f'settings {settings}'}")
        return False

    def note(self, text: str, name: str = "") -> None:
        """Note a line for the log, about one parameter or all."""
        self.lines.append((text, name))

    def lack(self, name: str, problem: str) -> None:
        """Note further state that is missing or does not fit."""
        self._lacking.append(f"{name}: {problem}")

    def refuse(self, argument: str, *, has_stepped: bool, found: bool | None = None) -> None:
        """Raise a ConfigurationError if one parameter's outcome is an error.

        Args:
            argument: What was passed.
            has_stepped: Whether the optimizer has stepped, so that no state may start fresh.
            found: Whether the checkpoint has any of the parameters of all ranks; None for those
                of this report.
        """
        if self._unknown:
            rule = "was written by an optimizer that the checkpoint does not tell"
            raise ConfigurationError(argument, _first(self._unknown), rule, START_FRESH)
        if self._lacking:
            rule = "must have all state of the same optimizer, in the shapes of this model"
            hint = f"Load a checkpoint of this model and optimizer. {START_FRESH}"
            if "no state" in self._lacking[0]:
                hint = (
                    "torch leaves out the state of weights that are frozen or had no gradient yet: "
                    f"freeze them before the build, or not while you save and load. {START_FRESH}"
                )
            raise ConfigurationError(argument, _first(self._lacking), rule, hint)
        if self.fresh and not (self.found if found is None else found):
            rule = "has state of none of this run's parameters, such as the one named"
            raise ConfigurationError(argument, min(self.fresh), rule, START_FRESH)
        if self.fresh and has_stepped:
            rule = "would start fresh, but the optimizer has stepped"
            hint = "Build the optimizer again before the load"
            raise ConfigurationError(argument, shortened(sorted(self.fresh)), rule, hint)

    @property
    def lacks(self) -> str:
        """The first state that is missing or does not fit; empty without any."""
        return self._lacking[0] if self._lacking else ""


def _lacking(
    required: Collection[str], misfit: Callable[[str], str | None], saved: SavedState
) -> Iterator[str]:
    """Yield which required state is missing or does not fit."""
    if required and not saved.kinds:
        yield f"no state ({', '.join(sorted(required))})"
        return
    for kind in sorted(required):
        if kind not in saved.kinds:
            yield f"no {kind}"
        elif (problem := misfit(kind)) is not None:
            yield f"{kind} {problem}"


START_FRESH = (
    "To start with fresh optimizer state, pass --no-load-optim; in your own loop, do not load it"
)
"""The way out of every refused load."""


def log_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Log the lines of all parameters on rank 0, each text once."""
    names_of: dict[str, list[str]] = {}
    for text, name in sorted(lines):
        names_of.setdefault(text, []).extend([name] if name else [])
    for text, names in names_of.items():
        of = f" of {len(names)} parameter(s), {shortened(names)}" if names else ""
        warn(logger, f"optimizer state{of}: {text}")


def _first(texts: Sequence[str]) -> str:
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return f"{texts[0]}{more}"


def shortened(names: Sequence[str]) -> str:
    """Join names, at most 4 of them."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more
