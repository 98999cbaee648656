"""Print plans as tables, or return them as plain values for JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_eopt.tools.plan.planning import Plan

_GIB = 2**30
_TERA = 1e12


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
                {**call._asdict(), "calls": count} for call, count in report.collectives.items()
            ],
            "host_reads": dict(report.host_reads),
            "memory": asdict(report.memory),
        },
        "counted": {
            "elements": report.elements,
            "bytes_per_element": report.bytes_per_element,
            "phases": [{**p._asdict(), **asdict(amount)} for p, amount in report.phases.items()],
            "in_all": asdict(report.total),
        },
        "spot_checks": None if plan.checks is None else asdict(plan.checks),
        "seconds": {**asdict(plan.times), "step": plan.times.step, "train_step": plan.train_step},
        "share_of_iteration": plan.share,
        "iteration_seconds": plan.train_step + plan.times.tail,
        "adam_seconds": plan.adam.step,
        "adam_iteration_seconds": plan.train_step + plan.adam.tail,
    }


def show_plan(plan: Plan, gpu: str, console: Console) -> None:
    """Print the tables of one plan."""
    cuts = plan.layout
    console.print(
        f"[bold]{plan.architecture.name}[/bold] on {cuts.world_size} x {gpu}: tp {cuts.tensor}, "
        f"pp {cuts.pipeline}, dp {cuts.data}, ep {cuts.expert}, etp {cuts.expert_tensor}"
    )
    rows: list[tuple[str, ...]] = [
        (
            " .. ".join(str(number) for number in sorted({stage.stages[0], stage.stages[-1]})),
            str(stage.busiest),
            _flops(stage.loads.max()),
            f"{stage.imbalance:.2f}",
        )
        for stage in plan.stages
    ]
    _print(console, "Stages, estimated", ("stages", "busiest rank", "TFLOP", "busiest/mean"), rows)
    report, times = plan.report, plan.times
    moved = report.bytes_per_element
    rows = [(name, f"{n:,}", f"{moved.get(name, 0):.1f}") for name, n in report.elements.items()]
    rows += [(name, matrices, "") for name, matrices in _owned(plan).items()]
    _print(console, f"Rank {plan.rank}, the busiest", ("optimizer", "updates", "B/element"), rows)
    rows = [
        (call.name, str(call.ranks), str(count), f"{call.sent * count / 2**20:,.1f}")
        for call, count in sorted(report.collectives.items())
    ]
    _print(console, "Collectives of a step", ("call", "ranks", "calls", "MiB of input"), rows)
    phases = {": ".join(filter(None, phase)): n for phase, n in report.phases.items()}
    rows = [
        (name, f"{n.kernels:,}", f"{n.bytes / 1e9:,.3f}", _flops(n.flops), f"{n.host_waits}")
        for name, n in {**phases, "total": report.total}.items()
    ]
    columns = ("phase", "kernels", "GB", "TFLOP", "waits")
    _print(console, "Kernels and GB except matrix products, and waits of the host", columns, rows)
    if plan.checks is not None:
        cost = plan.checks.cost
        rows = [
            ("TFLOP of products", _flops(cost.flops), f"{plan.checks.products:.2%}"),
            ("MiB sent", f"{cost.bytes / 2**20:,.2f}", f"{plan.checks.bytes:.2%}"),
            ("calls", f"{cost.calls:.2f}", f"{plan.checks.calls:.2%}"),
        ]
        _print(console, "Spot checks, on average", ("", "a step", "share of a step"), rows)
    memory = asdict(report.memory)
    rows = [(name, f"{size / _GIB:.2f}") for name, size in memory.items() if size is not None]
    _print(console, "Memory", ("kind", "GiB"), rows)
    rows = [(name, _ms(seconds)) for name, seconds in asdict(times).items()]
    rows += [("step, without gather", _ms(times.step))]
    rows += [("share of an iteration", f"{plan.share:.2%}")]
    rows += [("Adam's step", _ms(plan.adam.step)), ("Adam's tail", _ms(plan.adam.tail))]
    _print(console, f"Predicted for {gpu}", ("", "ms"), rows)


def show_sweep(plans: Sequence[Plan], gpu: str, console: Console) -> None:
    """Print a table with one line for each plan."""
    rows = [
        (
            *(str(size) for size in (plan.layout.tensor, plan.layout.pipeline, plan.layout.data)),
            str(plan.layout.expert),
            _flops(plan.report.total.flops),
            _ms(plan.times.step),
            f"{plan.share:.2%}",
            f"{sum(size or 0 for size in asdict(plan.report.memory).values()) / _GIB:.1f}",
        )
        for plan in plans
    ]
    columns = ("tp", "pp", "dp", "ep", "TFLOP", "step ms", "of an iteration", "GiB")
    title = f"{plans[0].architecture.name} on {plans[0].layout.world_size} x {gpu}, busiest ranks"
    _print(console, title, columns, rows)


def _print(
    console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _owned(plan: Plan) -> dict[str, str]:
    """Return, by optimizer, how many matrices the rank computes alone or in a team."""
    found: dict[str, str] = {}
    for name, schedule in plan.report.schedules:
        numbers = [n for wave in schedule.plan.waves for n in schedule.computed(wave)]
        shared = sum(bool(schedule.work.matrices[number].team) for number in numbers)
        total = f"{len(numbers)} of {len(schedule.names)} matrices, {shared} in teams"
        ranks = schedule.ranks.size
        found[f"{name}, {ranks} rank{'s' if ranks > 1 else ''}"] = total
    return found


def _flops(count: float) -> str:
    return f"{count / _TERA:.3f}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"
