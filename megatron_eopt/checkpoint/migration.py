"""Choose the source of each requested value in a distributed checkpoint."""

from collections.abc import Mapping

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import MAINS, STEP
from megatron_eopt.checkpoint.contents import Contents
from megatron_eopt.checkpoint.saved_state import Source, Value
from megatron_eopt.optimizers.continuation import (
    Continuation,
    Policy,
    SavedState,
    continuation_of,
    missing_state,
    note_of,
    shortened,
)


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
        self._reasons: dict[str, None] = {}
        self._notes: dict[str, list[str]] = {}

    def choose(self, values: Mapping[int, Value]) -> None:
        """Choose the sources of all values of one parameter."""
        where = next(iter(values.values())).where
        in_bucket = self._is_in_bucket(values)
        saved = self._contents.state_of(where.space, where.reader.name, in_bucket=in_bucket)
        sources: dict[tuple[int, str], Source | None] = {}

        def source(place: int, kind: str) -> Source | None:
            if (place, kind) not in sources:
                sources[place, kind] = values[place].source_in(self._contents, kind)
            return sources[place, kind]

        def fits(kind: str, other: str) -> bool:
            mine = (place for place, value in values.items() if value.kind == kind)
            return all(source(place, other) is not None for place in mine)

        # step counts may be missing, because the checkpoint also has one for all parameters
        wanted = {value.kind for value in values.values()} - MAINS - {STEP}
        found = continuation_of(wanted, where.reader, saved, self._policy, fits)
        for place, value in values.items():
            if value.kind in MAINS:
                kinds = (value.kind, *sorted(MAINS - {value.kind}))
                main = next((s for kind in kinds if (s := source(place, kind))), None)
                if main is not None:
                    self.chosen[place] = main
                else:
                    self._note("main weights are copied from the model's weights", value)
            elif value.is_count:
                count = source(place, STEP)
                if count is not None and not found.fresh:
                    self.chosen[place] = count
            else:
                self._take(place, value, found, saved, sources)

    def _take(
        self,
        place: int,
        value: Value,
        found: Continuation,
        saved: SavedState,
        sources: Mapping[tuple[int, str], Source | None],
    ) -> None:
        name, has = value.where.space.name, ", ".join(sorted(saved.keys)) or "none"
        if value.kind in found.fresh:
            self._note(f"{value.kind} starts fresh (the checkpoint has: {has})", value)
            self._fresh.append(f"{name}: {value.kind}")
        elif value.kind in found.missing:
            self._missing.append(f"{name}: {value.kind}")
            if saved.writer not in ("", value.where.reader.name) and saved.keys:
                self._reasons[f"{has} are {saved.writer}'s"] = None
        else:
            origin = found.origins[value.kind]
            source = sources[place, origin.key]
            assert source is not None
            self.chosen[place] = source._replace(factor=origin.factor)
            if note := note_of(value.kind, origin, saved):
                self._note(note, value)

    def lines(self) -> list[str]:
        """Return a line for each difference from the checkpoint."""
        in_bucket = any(source.bucket for source in self.chosen.values())
        if in_bucket and not self._contents.names_buckets:
            text = "the checkpoint does not name the parameters of its buckets, matched by order"
            self._notes[text] = []
        return [
            f"{note}: {len(names)} parameter(s): {shortened(names)}" if names else note
            for note, names in self._notes.items()
        ]

    def refuse(self) -> None:
        """Raise a ConfigurationError if state is missing, or should start fresh after a step."""
        if self._missing:
            by_bucket, reason = bool(self._contents.in_buckets), "; ".join(self._reasons)
            raise missing_state(self._missing, by_bucket=by_bucket, reason=reason)
        if self._fresh and self._has_stepped:
            rule = "is missing, but the optimizer has stepped and would not start fresh"
            way_out = "Build the optimizer again before the load"
            raise ConfigurationError("checkpoint", shortened(self._fresh), rule, way_out)

    def _is_in_bucket(self, values: Mapping[int, Value]) -> bool:
        """Return whether the checkpoint has a bucket with the parameter."""
        # a rank that owns a matrix but stores no part of it does not know the bucket
        return all(value.where.stored is None for value in values.values()) or any(
            value.source_in_bucket(kind, self._contents) is not None
            for value in values.values()
            for kind in self._contents.in_buckets
        )

    def _note(self, note: str, value: Value) -> None:
        names = self._notes.setdefault(note, [])
        if value.where.space.name not in names[-1:]:
            names.append(value.where.space.name)
