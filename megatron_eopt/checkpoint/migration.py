"""Choose the source of each requested value in a distributed checkpoint."""

import functools
from collections.abc import Mapping
from dataclasses import replace

from megatron_eopt.base.names import MAINS, STEP
from megatron_eopt.checkpoint.contents import Contents
from megatron_eopt.checkpoint.continuation import Note, Policy, Report, Wanted
from megatron_eopt.checkpoint.saved_state import StateValue


class LoadPlan:
    """Chooses where each requested value is read from, by its index among the requests."""

    def __init__(self, policy: Policy, contents: Contents, *, has_stepped: bool) -> None:
        self.chosen: dict[int, StateValue] = {}
        self._has_stepped = has_stepped
        self._contents = contents
        self._report = Report(policy)
        self._in_other_buckets = False

    def choose(self, values: Mapping[int, StateValue]) -> None:
        """Choose the sources of all values of one parameter."""
        where = next(iter(values.values())).where
        saved = self._contents.state_of(where.space, where.reader.name)
        # the checkpoint has state by bucket, but this parameter is in none that fits
        self._in_other_buckets |= bool(self._contents.in_buckets) and not saved.keys

        @functools.cache
        def source(index: int, kind: str) -> StateValue | None:
            return values[index].found_in(self._contents, kind)

        def misfit(kind: str, other: str) -> str | None:
            mine = (index for index, value in values.items() if value.kind == kind)
            lacking = (values[index] for index in mine if source(index, other) is None)
            return next((value.misfit_in(self._contents, other) for value in lacking), None)

        # step counts may be missing, because the checkpoint also has one for all parameters
        keys = frozenset(value.kind for value in values.values()) - MAINS - {STEP}
        wanted = Wanted(where.space.name, where.reader, keys)
        found = self._report.decide(wanted, saved, misfit)
        for index, value in values.items():
            if value.kind in MAINS:
                # storages call main weights differently (``base/names.py``), and each reads the
                # others'
                kinds = (value.kind, *sorted(MAINS - {value.kind}))
                main = next((s for kind in kinds if (s := source(index, kind))), None)
                if main is not None:
                    self.chosen[index] = main
                else:
                    text = "main weights are copied from the model's weights"
                    self._report.note(text, where.space.name)
            elif value.is_count:
                count = source(index, STEP)
                # fresh state counts from 0
                if count is not None and not found.fresh:
                    self.chosen[index] = count
            elif value.kind in found.origins:
                origin = found.origins[value.kind]
                its = source(index, origin.key)
                assert its is not None
                self.chosen[index] = replace(its, factor=origin.factor)

    def notes(self) -> list[Note]:
        """Return all differences from the checkpoint."""
        in_bucket = any(value.is_in_bucket for value in self.chosen.values())
        if in_bucket and not self._contents.bucket_names:
            text = "the checkpoint does not name the parameters of its buckets, matched by order"
            self._report.note(text)
        return self._report.notes

    def refuse(self) -> None:
        """Raise a ConfigurationError if state is missing, or should start fresh after a step."""
        self._report.refuse(
            "checkpoint", has_stepped=self._has_stepped, by_bucket=self._in_other_buckets
        )
