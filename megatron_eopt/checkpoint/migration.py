"""Choose the source of each requested value in a distributed checkpoint."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_eopt.base.names import MAINS, STEP
from megatron_eopt.checkpoint.contents import Contents
from megatron_eopt.checkpoint.continuation import LoadReport, Note, Policy, SavedState
from megatron_eopt.checkpoint.saved_state import StateValue


def choose(
    values: Sequence[StateValue], contents: Contents, policy: Policy, *, has_stepped: bool
) -> tuple[dict[int, StateValue], list[Note]]:
    """Return where each value is read from, by its index, and all differences from the checkpoint.

    Raises:
        ConfigurationError: If state is missing, or should start fresh after a step.
    """
    report, catalogue = LoadReport(policy), contents.catalogue
    sources: dict[int, StateValue] = {}
    in_other_buckets = False
    # state of one parameter continues or starts fresh together, see Note [Meaning of state]
    by_parameter: dict[str, dict[int, StateValue]] = {}
    for index, value in enumerate(values):
        by_parameter.setdefault(value.where.space.name, {})[index] = value.apart_from_model()
    for of_parameter in by_parameter.values():
        where = next(iter(of_parameter.values())).where
        saved = contents.state_of(where.space, where.reader.name)
        # the checkpoint has state by bucket, but this parameter is in none that fits
        in_other_buckets |= bool(catalogue.in_buckets) and not saved.keys
        sources |= _sources_of(of_parameter, saved, contents, report)
    report.refuse("checkpoint", has_stepped=has_stepped, by_bucket=in_other_buckets)
    if any(value.is_in_bucket for value in sources.values()) and not catalogue.bucket_names:
        report.note("the checkpoint does not name the parameters of its buckets, matched by order")
    return sources, report.notes


def _sources_of(
    values: Mapping[int, StateValue], saved: SavedState, contents: Contents, report: LoadReport
) -> dict[int, StateValue]:
    where = next(iter(values.values())).where
    sources: dict[int, StateValue] = {}

    @functools.cache
    def source(index: int, kind: str) -> StateValue | None:
        return values[index].found_in(contents, kind)

    def misfit(kind: str, other: str) -> str | None:
        of_kind = (index for index, value in values.items() if value.kind == kind)
        lacking = (values[index] for index in of_kind if source(index, other) is None)
        return next((value.misfit_in(contents, other) for value in lacking), None)

    # step counts may be missing, because the checkpoint also has one for all parameters
    keys = frozenset(value.kind for value in values.values()) - MAINS - {STEP}
    decided = report.decide(where.space.name, where.reader, keys, saved, misfit)
    for index, value in values.items():
        if value.kind in MAINS:
            # storages call main weights differently (``base/names.py``), and each reads the
            # others'
            kinds = (value.kind, *sorted(MAINS - {value.kind}))
            main = next((s for kind in kinds if (s := source(index, kind))), None)
            if main is not None:
                sources[index] = main
            else:
                text = "main weights are copied from the model's weights"
                report.note(text, where.space.name)
        elif value.is_count:
            count = source(index, STEP)
            # fresh state counts from 0
            if count is not None and not decided.fresh:
                sources[index] = count
        elif (origin := decided.origins.get(value.kind)) is not None:
            fitting = source(index, origin.key)
            assert fitting is not None
            sources[index] = replace(fitting, factor=origin.factor)
    return sources
