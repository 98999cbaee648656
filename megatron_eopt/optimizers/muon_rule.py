"""Muon on sharded parameters: matrices are whole only while they are orthogonalized.

Weight decay, momentum and the weight update are element-wise, so each rank applies them to its own
shards. Only directions are sent to other ranks, and updates are sent back.

Note [The way of a gradient]
    The chain clips gradients and steps its storages. In each, megatron-core's wrapper calls
    :meth:`ShardedOptimizer.step`, and that :meth:`MuonRule.step`. This runs a
    :class:`~megatron_eopt.optimizers.exchange.MatrixExchange`, which calls back, wave by wave:

    1. ``_directions`` mixes gradients into momenta and writes directions, by
       :func:`~megatron_eopt.math.passes.momentum_update_`. These are sent to the ranks that compute
       them.
    2. ``_update`` gets stacks of matrices, and calls :mod:`megatron_eopt.math.orthogonalize`.
    3. ``_apply`` gets updates that are back, and changes weights by
       :func:`~megatron_eopt.math.passes.update_`, and the model's copies with them.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.log import warn
from megatron_eopt.base.names import MOMENTUM, MOMENTUM_SCALE, STEP
from megatron_eopt.math.newton_schulz import ReduceT
from megatron_eopt.math.passes import empty_sums, momentum_update_, update_
from megatron_eopt.optimizers.exchange import ExchangeConfig, ParamWithGrad
from megatron_eopt.optimizers.momentum import RoundedMomentum
from megatron_eopt.optimizers.recorder import ORTHOGONALIZATION
from megatron_eopt.optimizers.update_rule import ParamGroup, State, UpdateRule
from megatron_eopt.optimizers.windows import Ahead, Window, windows_over
from megatron_eopt.storage.model_copies import model_copies_of
from megatron_eopt.storage.shard import ParamShard

logger = logging.getLogger(__name__)

_PACKAGE = __name__.partition(".")[0] + "."

WeightDecayT = Literal["decoupled", "l2", "independent"]
"""How weight decay acts: ``decoupled`` shrinks weights by ``lr * weight_decay`` (AdamW,
arXiv:1711.05101), ``independent`` by ``weight_decay`` at any learning rate, and ``l2`` adds
``weight_decay * weight`` to the gradient."""

WEIGHT_DECAY_METHODS: tuple[WeightDecayT, ...] = get_args(WeightDecayT)


class MuonRule(UpdateRule):
    """Muon as an update rule; see Note [The way of a gradient].

    What is sent when: Note [Phases of a step] of exchange.py. How long tensors are valid: Note
    [Lifetimes] of update_rule.py.

    One group of ranks stores all shards. ``optimizer`` has MuonSettings, which are read at each
    use. Matrices are computed in ``exchange_config.dtype``.
    """

    reports_updates = True
    fuses_grad_scale = True
    # whether the `_update` of this class takes slabs of a matrix that several ranks share, by
    # `reduce`; a class that overrides it and does not say so gets whole matrices
    takes_slabs = True
    # whether the `_directions` of this class depend on gradients, momenta, counts and settings of
    # groups alone, and write momenta alone; see Note [Look ahead, then commit] of windows.py. Of a
    # class that overrides it and does not say so, or overrides `_run`, nothing is computed ahead
    looks_ahead = True
    counts_steps = False  # whether each parameter's steps are counted, under ``step`` in its state

    def __init__(
        self, optimizer: Any, shards: Sequence[ParamShard], exchange_config: ExchangeConfig
    ) -> None:
        super().__init__(optimizer.called, shards)
        if not self._says("takes_slabs", MuonRule._update):
            exchange_config = replace(exchange_config, whole_only=True)
        self.optimizer = optimizer
        self._scales_of: Callable[[tuple[int, int]], tuple[float, ...]] = functools.cache(
            optimizer.orthogonalization.scales
        )
        self.windows = windows_over(self.shards, self._update, exchange_config)
        self.exchanges = [window.exchange for window in self.windows]
        self.exchange = self.exchanges[0]  # of the window that is stepped, or computed ahead
        self.rounding: RoundedMomentum | None = None  # stores momentum in fewer bits
        if optimizer.momentum_dtype != "fp32":
            self.rounding = RoundedMomentum(
                optimizer.momentum_dtype, shards, exchange_config.device
            )
            self.optional_state = frozenset({MOMENTUM_SCALE, STEP})
            if not type(self)._directions.__module__.startswith(_PACKAGE):
                text = "%s overrides _directions. With muon_momentum_dtype=%r, only MuonRule's own "
                text += "reads and writes momenta as they are stored: call it by super()"
                warn(logger, text, type(self).__name__, optimizer.momentum_dtype)
        self.counts_steps = self.counts_steps or self.rounding is not None
        # sums of squares of directions, by the number of the one matrix of their parameter
        self.squares: dict[int, Tensor] = {}

    @functools.cached_property
    def shapes(self) -> list[list[tuple[int, int]]]:
        """Shapes of each parameter's matrices, or of this rank's pieces in blockwise mode."""
        return [
            [layout.compact().local_shape(shard.ranks.rank) or (0, 0) for layout in shard.layouts]
            if self.exchange.blockwise
            else [matrix.shape for matrix in shard.split.matrices]
            for shard in self.shards
        ]

    @classmethod
    def _says(cls, name: str, method: Callable[..., Any]) -> bool:
        """Whether the class that a method comes from says something of it.

        What a base class says holds for its own method only.
        """
        home = next(base for base in cls.__mro__ if method.__name__ in vars(base))
        return bool(vars(home).get(name, False))

    @classmethod
    def can_look_ahead(cls) -> bool:
        """Whether updates can be computed before the gradient norm is known."""
        return cls._run is MuonRule._run and cls._says("looks_ahead", MuonRule._directions)

    def buffers(self) -> Iterator[Tensor]:
        """Yield communication buffers and index tensors, which live between steps."""
        yield from super().buffers()
        if self.rounding is not None:
            yield from self.rounding.tensors()

    def init(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create every momentum and, where steps are counted, step counters."""
        for _, param, number in self.numbered(groups):
            if MOMENTUM not in state[param] and self.rounding is not None:
                self.rounding.make(number, state[param], param)
            elif MOMENTUM not in state[param]:
                state[param][MOMENTUM] = torch.zeros_like(param, requires_grad=False)
            if self.counts_steps:
                zero = torch.zeros((), dtype=torch.float32, device=self._device_of_counts)
                state[param][STEP] = state[param].setdefault(STEP, zero).to(zero.device)

    @property
    def _device_of_counts(self) -> torch.device:
        # update rules that read them on the host keep them there, to avoid a synchronization
        return self.exchange.device if self.fuses_grad_scale else torch.device("cpu")

    def refuse_unsaved(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Raise a ConfigurationError for state of a subclass that checkpoints would not have."""
        listed = {STEP, *(one.path[0] for one in self.unsharded_state(groups, state))}
        for _, param, number in self.numbered(groups):
            for kind, value in self.saved_form(number, state[param]).items():
                fits = isinstance(value, Tensor) and value.shape == param.shape
                if kind not in listed and not fits:
                    rule = f"is state of {type(self).__name__} that Megatron's checkpoints lose"
                    hint = (
                        "State is a tensor of the parameter's shape, or a count with the name "
                        f"{STEP!r}; rows have those of NorMuonRule"
                    )
                    raise ConfigurationError(f"item.state[{kind!r}]", value, rule, hint)

    def allocate_for_load(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Create all state that is about to be loaded, in the form that checkpoints have."""
        self.init(groups, state)
        for _, param, number in self.numbered(groups):
            state[param].update(self.saved_form(number, state[param]))

    def saved_form(self, number: int, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state with its momentum in float32, which any ``momentum_dtype`` can load."""
        if self.rounding is None:
            return values
        without_scales = {kind: value for kind, value in values.items() if kind != MOMENTUM_SCALE}
        return {**without_scales, MOMENTUM: self.rounding.read(number, values)}

    @torch.no_grad()
    def pack(self, groups: Sequence[ParamGroup], state: State) -> None:
        """Round loaded momenta to the stored format, if there is one; collective."""
        if self.rounding is None:
            return
        self.init(groups, state)
        loaded = {
            number: (state[param], self.rounding.read(number, state[param]))
            for _, param, number in self.numbered(groups)
            if not self.rounding.is_kept(state[param])
        }
        self.rounding.write(range(len(self.shards)), loaded, nearest=True)

    def is_sharded_like_param(self, kind: str, value: Any, param: Tensor) -> bool:
        """Whether a state value has an element for each of the tensor's."""
        return kind != MOMENTUM_SCALE and super().is_sharded_like_param(kind, value, param)

    @torch.no_grad()
    def step(
        self, groups: Sequence[ParamGroup], state: State, windows: Sequence[Window] | None = None
    ) -> None:
        """Update the parameters of ``groups``, or of some windows; collective.

        Updates that were computed ahead are applied if they are valid.
        """
        for window in self.windows if windows is None else windows:
            items = self.with_grads(groups, state, window)
            ahead, window.ahead = window.ahead, None
            # in a group, a rank without gradients still takes part in the all-to-alls
            if self.exchange.ranks.group is None and not items:
                continue
            if self.counts_steps and items:
                self._count(items)
            if ahead is None or ahead.settings != self._settings(groups):
                self._run(items, groups)
            else:
                self._commit(items, ahead.updates)

    def _count(self, items: Mapping[int, ParamWithGrad]) -> None:
        """Count a step of some parameters, before it writes anything else."""
        counts = [item.state[STEP] for item in items.values()]
        increment = torch.ones_like(counts[0])
        if self.grad_scale is not None:
            # whether the step is skipped may be known on the device only
            increment = (~self.grad_scale.isnan()).to(increment)
        torch._foreach_add_(counts, [increment] * len(counts))

    @torch.no_grad()
    def compute_ahead(self, window: Window, groups: Sequence[ParamGroup], state: State) -> None:
        """Compute a window's updates from its gradients, and write nothing; collective."""
        # the norm is not known yet: if it asks for clipping, the updates are dropped
        self.scale_gradients(None)
        items = self.with_grads(groups, state, window)
        read = list(items.values())
        versions, norms = self._read(read)
        updates: dict[int, Tensor] = {}

        def directions(
            members: Mapping[int, ParamWithGrad],
            arriving: Sequence[int],
            outs: Mapping[int, Tensor] | None,
        ) -> Mapping[int, Tensor]:
            # into copies: the step itself will do the same to the state
            copies = {n: replace(it, state=self._as_stepped(it)) for n, it in members.items()}
            return self._directions(copies, arriving, outs)

        self.exchange.run(items, directions, lambda _, results: updates.update(results), keep=True)
        window.ahead = Ahead(updates, self._settings(groups), read, versions, norms)

    def _as_stepped(self, item: ParamWithGrad) -> dict[str, Any]:
        """Return a copy of a state for directions to write to, with the step counted."""
        copied = {**item.state, MOMENTUM: item.state[MOMENTUM].clone()}
        return copied | {STEP: item.state[STEP] + 1} if self.counts_steps else copied

    def _commit(self, items: Mapping[int, ParamWithGrad], updates: Mapping[int, Tensor]) -> None:
        """Write what was computed ahead."""
        if type(self)._directions is MuonRule._directions:
            # without Nesterov, no direction is written
            momenta = {number: item.state[MOMENTUM] for number, item in items.items()}
            self._momentum_update(items, momenta, None, nesterov=False)
        else:
            self._directions(items, (), None)
        self._apply(list(items.values()), updates)

    def unchanged(self) -> Tensor | None:
        """Return, on the device, whether what was read ahead is the same; None if nothing was."""
        same = []
        for ahead in (window.ahead for window in self.windows):
            if ahead is not None and ahead.items:
                versions, norms = self._read(ahead.items)
                equal = torch.stack(norms) == torch.stack(ahead.norms)
                same.append(equal.all() & (versions == ahead.versions))
        return torch.stack(same).all() if same else None

    def forget(self) -> None:
        """Drop the updates that were computed ahead."""
        for window in self.windows:
            window.ahead = None

    def _settings(self, groups: Sequence[ParamGroup]) -> list[Any]:
        """Return the settings that directions depend on."""
        if type(self)._directions is not MuonRule._directions:
            left_out = ("params", "lr")
            return [{k: v for k, v in group.items() if k not in left_out} for group in groups]
        is_l2 = self.optimizer.weight_decay_method == "l2"
        return [(group["momentum"], is_l2 and group["weight_decay"]) for group in groups]

    def _read(self, items: Sequence[ParamWithGrad]) -> tuple[list[int], list[Tensor]]:
        """Return versions and norms of the tensors that directions depend on.

        Versions count writes, but not those by ``tensor.data``. Gradients have none of their own,
        because they are views of a buffer that also gets other gradients.
        """
        params = [item.param for item in items]
        # nan for a gradient that is gone, because it is unequal to every norm
        grads = [p.new_full((), torch.nan) if p.grad is None else p.grad for p in params]
        tensors = [item.state[MOMENTUM] for item in items]
        if self.optimizer.weight_decay_method == "l2":
            tensors += params
        norms = list(torch._foreach_norm([*grads, *tensors])) if items else []
        return [tensor._version for tensor in tensors], norms

    def with_grads(
        self, groups: Sequence[ParamGroup], state: State, window: Window
    ) -> dict[int, ParamWithGrad]:
        """Return a window's parameters with a gradient, by the number of their shards.

        Its exchange becomes the current one.
        """
        self.exchange = window.exchange
        items = {}
        for group, param, number in self.numbered(groups):
            if MOMENTUM not in state[param]:
                # as torch's optimizers do, since a user may have cleared the state
                self.init(groups, state)
            if param.grad is not None:
                items[number] = ParamWithGrad(number, group, param, state[param])
        # in the order of the groups, or of the window's shards
        is_whole = len(self.windows) == 1
        return items if is_whole else {n: items[n] for n in window.members if n in items}

    def _run(self, items: Mapping[int, ParamWithGrad], groups: Sequence[ParamGroup]) -> None:
        """Update parameters; a hook for subclasses, around all waves."""
        self.exchange.run(items, self._directions, self._apply, self.host)

    def _directions(
        self,
        items: Mapping[int, ParamWithGrad],
        arriving: Sequence[int],
        outs: Mapping[int, Tensor] | None,
    ) -> Mapping[int, Tensor]:
        """Update momenta and return directions, by the number of the shard; a hook for subclasses.

        Args:
            items: The parameters of this rank that a wave is the first to need.
            arriving: The shards of all ranks that it is the first to need.
            outs: Flat memory for some of the directions, which may stay unused. With None,
                directions keep the momentum's dtype; otherwise they are rounded as they are sent.
        """
        # those in the state, unless it rounds them
        momenta = {
            number: item.state[MOMENTUM]
            if self.rounding is None
            else self.rounding.read(number, item.state)
            for number, item in items.items()
        }
        directions = self._momentum_update(items, momenta, outs, self.optimizer.nesterov)
        if self.rounding is not None:
            new = {n: (item.state, momenta[n]) for n, item in items.items()}
            self.rounding.write(arriving, new)
        return directions

    def _momentum_update(
        self,
        items: Mapping[int, ParamWithGrad],
        momenta: Mapping[int, Tensor],
        outs: Mapping[int, Tensor] | None,
        nesterov: bool,
    ) -> dict[int, Tensor]:
        """Mix gradients into ``momenta``, and return directions; see ``_directions``."""
        sent, places = self.exchange.dtype, outs or {}
        directions: dict[int, Tensor] = {}
        for group, members in _by_group(items.values()):
            written: list[Tensor | None] = []
            sums: list[Tensor | None] = []
            for item in members:
                momentum, place = momenta[item.number], places.get(item.number)
                rounds = outs is not None and sent.itemsize < momentum.dtype.itemsize
                dtype = sent if rounds else momentum.dtype
                out = squares = None
                if place is not None and (place.dtype, place.numel()) == (dtype, momentum.numel()):
                    out = place
                    # A direction in a stack is computed there, so its sum is that of its matrix, or
                    # of this rank's slab, which `normalize` adds over ranks. With several matrices
                    # it is the sum of none.
                    if len(self.shards[item.number].layouts) == 1:
                        squares = empty_sums(out)
                elif nesterov or rounds:
                    out = torch.empty_like(momentum, dtype=dtype)
                if squares is not None:
                    self.squares[self.exchange.first[item.number]] = squares
                # without Nesterov, place and rounding, the momentum itself is the direction
                directions[item.number] = momentum if out is None else out.view(momentum.shape)
                written.append(out)
                sums.append(squares)
            momentum_update_(
                [momenta[item.number] for item in members],
                written,
                [item.param.grad for item in members],
                [item.param for item in members],
                # gradients are not clipped yet: the pass multiplies them by their scale
                self.grad_scale,
                # settings are read from the group in each step, so that they can be changed
                group["momentum"],
                group["weight_decay"] if self.optimizer.weight_decay_method == "l2" else 0.0,
                nesterov=nesterov,
                sums=sums,
            )
        return directions

    def _update(
        self, stack: Tensor, matrices: Sequence[int], reduce: ReduceT | None, shape: tuple[int, int]
    ) -> None:
        """Replace a stack of directions by updates, in place; a hook for subclasses.

        Args:
            stack: ``(batch, rows, cols)``; rows are inputs if ``exchange.transposed`` says so.
            matrices: The index of each matrix.
            reduce: Adds up sums over a matrix's slabs; None if matrices are whole, as they are
                unless the class that has this method sets :attr:`takes_slabs`.
            shape: Of a whole matrix.
        """
        # of the whole matrix, also if this rank has a slab of it
        scales = self._scales_of(self.exchange.out_in(matrices[0], shape))
        # a stack is divided in one pass, so sums of squares must be known of all its matrices
        matrix_squares = [self.squares.pop(matrix, None) for matrix in matrices]
        sums = [squares for squares in matrix_squares if squares is not None]
        squares = None
        if len(sums) == len(matrix_squares):
            squares = sums[0].unsqueeze(0) if len(sums) == 1 else torch.stack(sums)
        factors_ = self.optimizer.orthogonalization.factors_
        if self.record is None:
            factors_(stack, reduce, shape, scales, squares)
        else:
            with self.record.timed(ORTHOGONALIZATION):
                factors_(stack, reduce, shape, scales, squares)

    def _apply(self, items: Sequence[ParamWithGrad], updates: Mapping[int, Tensor]) -> None:
        """Apply weight decay, and subtract the updates; a hook for subclasses."""
        if self.record is not None:
            self.record.count_updates({item.number: updates[item.number] for item in items})
        for group, members in _by_group(items):
            params, lr = [item.param for item in members], group["lr"]
            share = {"decoupled": lr, "independent": 1.0, "l2": 0.0}
            update_(
                params,
                # taken from the tensors, so that nobody copies them again after the step
                model_copies_of(params),
                [updates[item.number] for item in members],
                self.grad_scale,
                lr,
                group["weight_decay"] * share[self.optimizer.weight_decay_method],
                cautious=self.optimizer.cautious_weight_decay,
            )


def _by_group(items: Iterable[ParamWithGrad]) -> list[tuple[ParamGroup, list[ParamWithGrad]]]:
    groups: dict[int, tuple[ParamGroup, list[ParamWithGrad]]] = {}
    for item in items:
        groups.setdefault(id(item.group), (item.group, []))[1].append(item)
    return list(groups.values())
