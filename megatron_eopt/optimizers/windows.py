"""Windows: shards of a rule that are stepped together, perhaps computed before that.

A step is a list of windows, and a plain step has one. Overlap with communication makes one for each
bucket group of Megatron, orders them, and computes ahead; nothing else differs.

Note [Look ahead, then commit]
    Newton-Schulz, the expensive part, needs only a window's gradients and momenta, and writes to
    new tensors. So it can run while other gradients are still being reduced. Momenta, counts and
    weights are written once the gradient norm is known, bit-equal to a step that did not look
    ahead. If gradients are clipped, or what was read has changed meanwhile (also weights, with L2
    weight decay), the updates are dropped and computed again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from megatron_eopt.optimizers.exchange import ExchangeConfig, MatrixExchange, ParamWithGrad
from megatron_eopt.storage.shard import ParamShard


class Ahead(NamedTuple):
    """Updates that were computed ahead, and what they depend on."""

    updates: dict[int, Tensor]  # by the number of the shard
    settings: list[Any]  # of the groups
    items: list[ParamWithGrad]  # the parameters
    versions: list[int]  # of the tensors that were read
    norms: list[Tensor]  # of the same tensors and of gradients


@dataclass(eq=False)
class Window:
    """Some shards of a rule, and what computes their matrices."""

    members: list[int]  # the numbers of the shards
    exchange: MatrixExchange
    ahead: Ahead | None = None


def windows_over(
    shards: Sequence[ParamShard], update: Callable[..., None], exchange_config: ExchangeConfig
) -> list[Window]:
    """Return the windows of a rule's shards, in the order in which they are stepped."""
    windows: list[Window] = []
    of_shards = exchange_config.windows or [0] * len(shards)
    for number in sorted(set(of_shards)):
        members = [shard for shard, window in enumerate(of_shards) if window == number]
        exchange = MatrixExchange(
            [shards[member] for member in members],
            update,
            exchange_config,
            numbers=members,
            before=windows[-1].exchange if windows else None,
        )
        windows.append(Window(members, exchange))
    return windows
