"""Print plans as tables, or return them as plain values for JSON."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_eopt.tools.plan.cost import bytes_sent
from megatron_eopt.tools.plan.planning import Plan
from megatron_eopt.tools.plan.search import AS_SHORT, Found
from megatron_eopt.tools.rates import Weights
from megatron_eopt.wrappers.memory import Memory

_GIB = 2**30
_TERA = 1e12


@dataclass(frozen=True)
class Sources:
    """What a plan is based on."""

    tokens: int  # tokens per step
    micro_batch: int  # sequences that a GPU computes at a time
    taken: dict[str, str]  # where tokens, layout and optimizer come from
    left_out: list[str]  # what the model has that the plan leaves out


def as_dict(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values, in seconds, bytes and FLOPs."""
    report = plan.report
    return {
        "architecture": asdict(plan.architecture),
        "layout": asdict(plan.layout),
        "ranks": plan.layout.world_size,
        "stages": [
            {
                "stages": list(stage.stages),
                "busiest": stage.busiest,
                "estimated_flops": float(stage.loads.max()),
                "imbalance": stage.imbalance,
            }
            for stage in plan.stages
        ],
        "busiest_rank": {
            "rank": plan.rank,
            "owns": _owned(plan),
            "collectives": [
                {**call._asdict(), "calls": count, "bytes_sent": bytes_sent(call) * count}
                for call, count in report.collectives.items()
            ],
            "host_reads": dict(report.host_reads),
            "memory": asdict(report.memory),
        },
        "fullest_rank": {"rank": plan.fullest[0], "memory": asdict(plan.fullest[1])},
        "left_for_activations": plan.left,
        "left_beside_activations": plan.spare,
        "counted": {
            "elements": report.elements,
            "bytes_per_element": report.bytes_per_element,
            "phases": [{**p._asdict(), **asdict(amount)} for p, amount in report.phases.items()],
            "in_all": asdict(report.total),
        },
        "seconds": {
            **asdict(plan.times),
            "step": plan.times.step,
            "train_step": plan.passes.seconds,
        },
        "estimated_passes": asdict(plan.passes),
        "share_of_iteration": plan.share,
        "iteration_seconds": plan.iteration,
        "tokens_per_second": plan.throughput,
        "adam_seconds": plan.adam.step,
        "adam_iteration_seconds": plan.adam_iteration,
        "adam_memory": asdict(plan.adam_memory),
    }


def show_plan(plan: Plan, gpu: str, sources: Sources, console: Console) -> None:
    """Print what the optimizer costs beside Adam, what a plan is based on, and its tables."""
    size = plan.layout.world_size
    console.print(f"{plan.architecture.name} on {size} x {gpu}: {plan.layout}")
    if plan.optimizer != "adam":
        _show_comparison(plan, gpu, console)
    _show_sources(sources, console)
    fullest, most = plan.fullest
    whose = (
        "computes most, and holds" if fullest == plan.rank else f"computes most; {fullest} holds"
    )
    left, passes = plan.left / _GIB, plan.passes
    room = f"{left:.2f} are left for activations" if left > 0 else "it does NOT fit"
    console.print(
        f"Rank {plan.rank} {whose} most memory: {_gib(most):.2f} of {plan.capacity / _GIB:g} GiB "
        f"without activations; {room}"
    )
    fits = "" if plan.spare > 0 else ", so they do NOT fit"
    console.print(
        f"Activations are estimated at {passes.kept / _GIB:.2f} GiB, or "
        f"{passes.recomputed / _GIB:.2f} with full recomputation{fits}"
    )
    # estimates rank stages; the FLOPs are those that are counted below
    largest = max(max(stage.loads.max() for stage in plan.stages), 1.0)
    rows: list[tuple[str, ...]] = [
        (
            " .. ".join(str(number) for number in sorted({stage.stages[0], stage.stages[-1]})),
            str(stage.busiest),
            f"{stage.loads.max() / largest:.0%}",
            f"{stage.imbalance:.2f}",
        )
        for stage in plan.stages
    ]
    columns = ("stages", "busiest rank", "its products", "busiest/mean")
    _print(console, "Stages, products relative to the busiest rank's", columns, rows)
    report, times = plan.report, plan.times
    moved = report.bytes_per_element
    rows = [(name, f"{n:,}", f"{moved.get(name, 0):.1f}") for name, n in report.elements.items()]
    rows += [(name, matrices, "") for name, matrices in _owned(plan).items()]
    _print(console, f"Rank {plan.rank}, the busiest", ("optimizer", "updates", "B/element"), rows)
    calls: defaultdict[tuple[str, str, int], int] = defaultdict(int)
    sent: defaultdict[tuple[str, str, int], float] = defaultdict(float)
    for call, often in sorted(report.collectives.items()):
        calls[call.purpose, call.name, call.ranks] += often
        sent[call.purpose, call.name, call.ranks] += bytes_sent(call) * often
    rows = []
    for kind, number in calls.items():
        rows.append((*map(str, kind), str(number), f"{sent[kind] / 2**20:,.1f}"))
    what = ("for", "call", "ranks", "calls", "MiB sent")
    _print(console, "Collectives of a step", what, rows)
    phases = {": ".join(filter(None, phase)): n for phase, n in report.phases.items()}
    rows = [
        (name, f"{n.kernels:,}", f"{n.bytes / 1e9:,.3f}", _flops(n.flops), f"{n.host_waits}")
        for name, n in {**phases, "total": report.total}.items()
    ]
    title = "Kernels and GB except matrix products, and waits of the host"
    _print(console, title, ("phase", "kernels", "GB", "TFLOP", "waits"), rows)
    memories = {plan.rank: report.memory, fullest: most}
    kinds = asdict(most)
    rows = [
        (name, *(f"{(getattr(memory, name) or 0) / _GIB:.2f}" for memory in memories.values()))
        for name in kinds
    ]
    rows.append(("total, without host", *(f"{_gib(memory):.2f}" for memory in memories.values())))
    _print(console, "Memory in GiB", ("kind", *(f"rank {rank}" for rank in memories)), rows)
    rows = [(name, _ms(seconds)) for name, seconds in asdict(times).items()]
    rows += [("step, without gather", _ms(times.step))]
    rows += [("Adam's step", _ms(plan.adam.step)), ("Adam's tail", _ms(plan.adam.tail))]
    _print(console, f"Predicted for {gpu}", ("", "ms"), rows)
    how = " with full recomputation" if passes.recomputes else ""
    seconds = {
        f"compute{how}": passes.compute,
        "traffic": passes.traffic,
        "pipeline bubble": passes.bubble,
        "optimizer's tail": times.tail,
        "iteration": plan.iteration,
    }
    rows = [(name, f"{_ms(each)} ms") for name, each in seconds.items()]
    rows += [("share of the step", f"{plan.share:.2%}")]
    rows += [("tokens a second", f"{plan.throughput:,.0f}")]
    _print(console, "Iteration", ("", "estimate"), rows)


def show_sweep(
    found: Found, title: str, capacity: float, sources: Sources, console: Console
) -> None:
    """Print what plans are based on, a table with one line for each, and which to choose."""
    _show_sources(sources, console)
    rows = [
        (
            *(str(size) for size in astuple(plan.layout)[:5]),
            f"{1e3 * plan.times.step:.1f}",
            f"{plan.iteration:.2f}",
            f"{plan.throughput:,.0f}",
            f"{_gib(plan.fullest[1]):.1f}",
            f"{plan.passes.activations / _GIB:.1f}{'r' if plan.passes.recomputes else ''}",
            f"{plan.spare / _GIB:.1f}" if plan.spare > 0 else "no",
        )
        for plan in found.plans
    ]
    columns = ("tp", "pp", "dp", "ep", "etp", "step", "iter.", "tokens/s", "memory", "act.", "left")
    if rows:
        _print(console, f"{title}: step in ms, iteration in s, memory in GiB", columns, rows)
    if any(plan.passes.recomputes for plan in found.plans):
        console.print("r: with full recomputation; activations would not fit without it.")
    number = sum(plan.spare > 0 for plan in found.plans)
    others = [f"{found.unfit} do not fit"] if found.unfit else []
    others += [f"{found.longer} others take longer"] if found.longer else []
    console.print(
        f"{'; '.join([f'{number} fit', *others])} ({capacity / _GIB:g} GiB, with activations)."
    )
    if found.best is not None:
        console.print(
            f"The shortest iteration of those that fit: {found.best.layout} (of layouts within "
            f"{AS_SHORT - 1:.0%}, the one with most room for activations)"
        )
    else:
        console.print("Larger tp, pp or ep, or more GPUs, need less memory on each.")


def show_rates(
    rates: Mapping[str, float], weights: Mapping[str, Weights], mean: float, console: Console
) -> None:
    """Print the new rate of each kind of weight, if it depends on it, and one for all."""
    rows = [
        (
            name.rpartition("layers.*.")[2],
            " x ".join(map(str, weights[name].block)),
            f"{rate:.4g}",
            f"{rate / mean:.3f}",
        )
        for name, rate in rates.items()
    ]
    if rows:
        _print(console, "New rates", ("weight", "matrix", "rate", "lr_mult"), rows)
    spread = max(rates.values(), default=1.0) / min(rates.values(), default=1.0)
    if spread < 1 + 1e-9:
        console.print(f"All updates stay the same with --muon-lr {mean:.4g}")
        return
    console.print(
        f"No rate keeps all updates: they would differ by a factor of {spread:.2f}. "
        f"--muon-lr {mean:.4g} keeps their mean. With it, overrides with these lr_mult keep each."
    )


def _show_comparison(plan: Plan, gpu: str, console: Console) -> None:
    """Print milliseconds and GiB of the optimizer and of Adam, and how they differ."""
    memory, adam = plan.fullest[1], plan.adam_memory
    columns = {
        "step, ms": (1e3 * plan.times.step, 1e3 * plan.adam.step),
        "iteration, ms": (1e3 * plan.iteration, 1e3 * plan.adam_iteration),
        "kept, GiB": (memory.kept / _GIB, adam.kept / _GIB),
        "peak, GiB": (_gib(memory), _gib(adam)),
    }
    names = (plan.optimizer, "adam")
    rows = [
        (name, *(f"{pair[row]:,.2f}" for pair in columns.values()))
        for row, name in enumerate(names)
    ]
    rows.append(("difference", *(f"{ours - adams:+,.2f}" for ours, adams in columns.values())))
    # of what a run pays and needs in all; steps alone may differ many times over
    _, *whole = columns.values()
    rows.append(("", "", *(f"{ours / adams - 1:+.2%}" for ours, adams in whole)))
    title = f"{plan.optimizer} beside Adam, predicted for {gpu}; memory without activations"
    _print(console, title, ("optimizer", *columns), rows)


def _show_sources(sources: Sources, console: Console) -> None:
    console.print(f"tokens per step: {sources.tokens:,}")
    for kind, source in sources.taken.items():
        console.print(f"{kind} from: {source}")
    for text in sources.left_out:
        console.print(f"left out: {text}")


def _gib(memory: Memory) -> float:
    return memory.total / _GIB


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        # names are for copying, so they must be whole
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _owned(plan: Plan) -> dict[str, str]:
    """Return, by optimizer, how many matrices the rank computes alone or in a team."""
    owned: dict[str, str] = {}
    for name, schedule in plan.report.schedules:
        numbers = [n for wave in schedule.plan.waves for n in schedule.computed(wave)]
        shared = sum(bool(schedule.placements[number].group) for number in numbers)
        total = f"{len(numbers)} of {len(schedule.names)} matrices, {shared} in teams"
        ranks = schedule.ranks.size
        owned[f"{name}, {ranks} rank{'s' if ranks > 1 else ''}"] = total
    return owned


def _flops(count: float) -> str:
    return f"{count / _TERA:.3f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
