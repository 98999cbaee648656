"""The report: how many changes of each room are noticed, and which are not."""

import math
from collections.abc import Sequence

from scripts.mutation.changes import Change
from scripts.mutation.trial import Result

Outcome = tuple[Change, Result]


def interval(noticed: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """Return Wilson's interval of a rate: by default, it holds the true one in 95 % of samples."""
    rate = noticed / total
    middle = rate + z**2 / (2 * total)
    half = z * math.sqrt(rate * (1 - rate) / total + (z / (2 * total)) ** 2)
    scale = 1 + z**2 / total
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a row for each room and one for all, in Markdown."""
    rooms = sorted({change.room for change, _ in outcomes})
    rows = [_row(f"`{room}`", [it for it in outcomes if it[0].room == room]) for room in rooms]
    head = ["| room | changes | noticed | unnoticed | rate |", "|---|---|---|---|---|"]
    return "\n".join([*head, *rows, _row("all", outcomes)])


def _row(title: str, outcomes: Sequence[Outcome]) -> str:
    total = len(outcomes)
    noticed = sum(result.is_noticed for _, result in outcomes)
    return f"| {title} | {total} | {noticed} | {total - noticed} | {noticed / total:.0%} |"


def report(outcomes: Sequence[Outcome], texts: dict[str, str], seed: str, possible: int) -> str:
    """Return the report in Markdown. ``texts`` are those of the modules, by file."""
    noticed = sum(result.is_noticed for _, result in outcomes)
    low, high = interval(noticed, len(outcomes))
    summary = (
        f"{noticed} of {len(outcomes)} changes were noticed, drawn from {possible:,} with seed"
        f" `{seed}`: {noticed / len(outcomes):.1%}, and between {low:.1%} and {high:.1%} of all"
        " with 95 % confidence."
    )
    parts = [summary, table(outcomes)]
    parts += [survivor(it, texts) for it in outcomes if not it[1].is_noticed]
    return "\n\n".join(parts) + "\n"


def survivor(outcome: Outcome, texts: dict[str, str]) -> str:
    """Return a change that went unnoticed."""
    change, result = outcome
    more = f", {result.left_out} slower ones left out" if result.left_out else ""
    title = f"`{change.file}`, `{change.function}`: {change.kind}. {result.verdict}{more}"
    return f"{title}\n\n```diff\n{change.diff(texts[change.file])}\n```"
