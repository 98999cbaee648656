"""Element-wise passes of an optimizer step over lists of tensors.

On a GPU, a pass is one kernel for all tensors of equal dtypes, which reads and writes each number
once. Elsewhere it consists of torch functions. Both give the same bits, except for Adam, whose sums
torch itself rounds differently on GPUs and CPUs.

Note [Gradient scale]
    A pass multiplies gradients by ``grad_scale`` (a 0-D float32 tensor) and rounds as if that had
    been done in place, but leaves the gradients unchanged. If it is nan, a pass writes nothing.
    So a step can be launched before the host knows whether it must be skipped.

Note [Cautious weight decay]
    A weight decays only where its update does not have the opposite sign, so only where the step
    moves it toward zero anyway: ``p <- p - lr (u + decay [u p >= 0] p)``. This is the definition of
    the paper (Chen et al. 2025, arXiv:2510.12402), and of Muon in modded-nanogpt, whose Adam asks
    for ``u p > 0``. Adam's update has the sign of its first moment. Signs are compared, since a
    product of small numbers may round to 0.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.kernels import Family

KERNELS = Family("momentum, weight and Adam updates")

# as torch's optimizers group tensors: one call, because reading attributes of each takes time
_group_by_device_and_dtype: Any = torch._C._group_tensors_by_device_and_dtype

# torch allows one DEF for a namespace; other modules add to it by FRAGMENT
_library: Any = torch.library.Library("megatron_eopt", "DEF")  # type: ignore[no-untyped-call]
_NAMES = {
    "momentum_update": (
        "Tensor(a!)[] momenta, Tensor(b!)[] outs, Tensor[] grads, Tensor[] weights, "
        "Tensor(c!)[] outs_of_sums"
    ),
    "update": "Tensor(a!)[] weights, Tensor(b!)[] outs, Tensor[] updates",
    "adam": (
        "Tensor(a!)[] weights, Tensor(b!)[] firsts, Tensor(c!)[] seconds, Tensor(d!)[] outs, "
        "Tensor[] grads, Tensor[] steps"
    ),
}
"""Tensor lists of each kernel. ``outs`` are only written; a list that is not needed is empty."""

_PER_ELEMENT = {"momentum_update": 4, "update": 3, "adam": 5}
"""How many of these lists, the first ones, have tensors of equal sizes."""


def _launch(name: str, *arguments: Any) -> None:
    *lists, grad_scale, numbers = arguments
    _check_sizes(lists[: _PER_ELEMENT[name]])
    module = "megatron_eopt.math.triton_passes"
    KERNELS.call(lists[0][0], module, "launch", name, lists, grad_scale, numbers)


def _register(name: str) -> None:
    _library.define(f"{name}({_NAMES[name]}, Tensor? grad_scale, float[] numbers) -> ()")
    _library.impl(name, lambda *args: _launch(name, *args), "CompositeExplicitAutograd")
    torch.library.register_fake(f"megatron_eopt::{name}", lambda *_: None, lib=_library)


for _name in _NAMES:
    _register(_name)


BLOCK = 2048
"""Numbers that a kernel's program handles, of which one sum of squares is taken."""


def momentum_update_(
    momenta: Sequence[Tensor],
    outs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    weights: Sequence[Tensor],
    grad_scale: Tensor | None,
    momentum: float,
    decay: float = 0.0,
    *,
    nesterov: bool,
    sums: Sequence[Tensor | None] = (),
) -> None:
    """Do ``M <- momentum M + (1 - momentum) G``, and write rounded directions to ``outs``.

    With ``nesterov`` a direction is ``momentum M + (1 - momentum) G``, otherwise ``M``; an out of
    None gets none. Before, ``decay`` times the weight is added to the gradient. ``sums`` get the
    sums of squares of each :data:`BLOCK` numbers of directions; see :func:`empty_sums`.
    """
    numbers = (1 - momentum, momentum if nesterov else 1.0, decay)
    for lists in _alike(momenta, outs, grads, weights if decay else (), sums):
        if _is_served(lists[:-1]):
            torch.ops.megatron_eopt.momentum_update(*lists, grad_scale, numbers)
        else:
            _momentum_update(lists[:-1], grad_scale, numbers)


def empty_sums(direction: Tensor) -> Tensor | None:
    """Return the tensor for a direction's sums of squares, float64; None without kernels."""
    if not _is_served([[direction]]):
        return None
    return direction.new_empty(-(-direction.numel() // BLOCK), dtype=torch.float64)


def _momentum_update(
    lists: Sequence[list[Tensor]], grad_scale: Tensor | None, numbers: Sequence[float]
) -> None:
    momenta, outs, grads, weights, *_ = lists
    mix, of_momentum, decay = numbers
    if grad_scale is not None:
        # reads a number of the device, so here, without our kernels, a GPU's host waits
        if math.isnan(grad_scale):
            return
        grads = list(torch._foreach_mul(grads, float(grad_scale)))
    if weights and decay:
        grads = list(torch._foreach_add(grads, weights, alpha=decay))
    # `lerp` takes equal dtypes only
    grads = [grad.to(kept.dtype) for grad, kept in zip(grads, momenta, strict=True)]
    torch._foreach_lerp_(momenta, grads, mix)
    # no outs: the momenta themselves are the directions
    for out, grad, kept in zip(outs, grads, momenta, strict=False):
        if of_momentum != 1.0:
            torch.lerp(grad, kept, of_momentum, out=out.view(grad.shape))
        else:
            out.view(kept.shape).copy_(kept)


def update_(
    weights: Sequence[Tensor],
    copies: Sequence[Tensor | None],
    updates: Sequence[Tensor],
    grad_scale: Tensor | None,
    lr: float,
    decay: float,
    *,
    cautious: bool = False,
) -> None:
    """Do ``p -= decay p`` and ``p -= lr u``, each rounded; round the result into ``copies``.

    ``cautious``: see Note [Cautious weight decay].
    """
    # without decay, 0.0 - x is +0, which keeps the signs of zeros
    numbers = (0.0 - decay, -lr, float(cautious))
    for lists in _alike(weights, copies, updates):
        if _is_served(lists):
            torch.ops.megatron_eopt.update(*lists, grad_scale, numbers)
        else:
            _update(lists, grad_scale, numbers)


def _update(
    lists: Sequence[list[Tensor]], grad_scale: Tensor | None, numbers: Sequence[float]
) -> None:
    weights, copies, updates = lists
    minus_decay, minus_lr, cautious = numbers
    if grad_scale is not None and math.isnan(grad_scale):
        return
    # the addition itself converts updates that are narrower than their weight
    narrow = [
        update if update.dtype.itemsize < weight.dtype.itemsize else update.to(weight.dtype)
        for update, weight in zip(updates, weights, strict=True)
    ]
    if minus_decay and cautious:
        _decay_cautiously(weights, narrow, minus_decay)
    elif minus_decay:
        # p - decay * p instead of (1 - decay) * p: rounds as emerging-optimizers does
        torch._foreach_add_(weights, weights, alpha=minus_decay)
    torch._foreach_add_(weights, narrow, alpha=minus_lr)
    if copies:
        torch._foreach_copy_(copies, weights)


def _decay_cautiously(
    weights: Sequence[Tensor], updates: Sequence[Tensor], minus_decay: float
) -> None:
    """Do ``p += minus_decay p`` where Note [Cautious weight decay] says so."""
    # one by one, so that only one parameter's signs need memory
    for weight, update in zip(weights, updates, strict=True):
        weight.add_(weight * (weight.sign() * update.sign() >= 0), alpha=minus_decay)


def adam_(
    lists: Sequence[Sequence[Tensor | None]],
    largest: list[Tensor],
    grad_scale: Tensor | None,
    group: Mapping[str, Any],
    *,
    cautious: bool = False,
) -> None:
    """Run an Adam step with the settings of a torch parameter group.

    ``lists`` are weights, first and second moments, copies, gradients and step counts. ``largest``
    has the largest second moments of AMSGrad. ``cautious``, for decoupled weight decay: see Note
    [Cautious weight decay].
    """
    # what the kernel does not know is left to torch
    is_plain = not (largest or group["maximize"] or isinstance(group["lr"], Tensor))
    columns: Any = (*lists, largest)
    if not all(map(Tensor.is_contiguous, lists[0])):  # type: ignore[arg-type]
        columns = zip(*map(_in_memory_order, _rows(columns)), strict=True)
    for *part, most in _alike(*columns):
        if not (is_plain and _is_served(part)):
            _adam(part, most, grad_scale, group, cautious=cautious)
            continue
        one = torch.ones_like(part[-1][0])
        # nan is unequal to itself: a skipped step counts 0, which only the device knows yet
        done = one if grad_scale is None else (grad_scale == grad_scale).float()
        torch._foreach_add_(part[-1], [done] * len(part[-1]))
        numbers = adam_numbers(group, cautious=cautious)
        torch.ops.megatron_eopt.adam(*part, grad_scale, numbers)


def adam_numbers(group: Mapping[str, Any], *, cautious: bool = False) -> tuple[float, ...]:
    """Return what an Adam step computes with: what kernels read, then what torch reads."""
    (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
    # 0.0 - x and not -x: without decay this is +0, which keeps the signs of zeros
    decays = (0.0 - lr * decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)
    mixing = (1 - beta1, 1 - beta2, _log2(beta1), _log2(beta2))
    of_torch = (beta1, beta2, decay, float(group["decoupled_weight_decay"]))
    return (lr, *decays, *mixing, group["eps"], float(cautious), *of_torch)


def _adam_on_host(
    lists: Sequence[list[Tensor]], grad_scale: Tensor | None, numbers: Sequence[float]
) -> None:
    *others, steps = lists
    lr, *_, eps, cautious, beta1, beta2, decay, is_decoupled = numbers
    group = {"lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
    group |= {"decoupled_weight_decay": bool(is_decoupled), "amsgrad": False, "maximize": False}
    # the caller has counted this step, as for a kernel
    counts = [step - 1 for step in steps]
    _adam([*others, counts], [], grad_scale, group, cautious=bool(cautious))


ON_HOST = {"momentum_update": _momentum_update, "update": _update, "adam": _adam_on_host}
"""With what kernels are compared."""


def _adam(
    lists: Sequence[list[Tensor]],
    largest: list[Tensor],
    grad_scale: Tensor | None,
    group: Mapping[str, Any],
    *,
    cautious: bool = False,
) -> None:
    weights, firsts, seconds, copies, grads, steps = lists
    _check_sizes([weights, firsts, seconds, grads])
    if grad_scale is not None:
        if math.isnan(grad_scale):
            return
        grads = list(torch._foreach_mul(grads, float(grad_scale)))
    beta1, beta2 = group["betas"]
    kept = ("amsgrad", "lr", "weight_decay", "eps", "maximize", "decoupled_weight_decay")
    settings = {name: group[name] for name in kept} | {"beta1": beta1, "beta2": beta2}
    written = (weights, firsts, seconds, largest)
    # torch's kernels read and write memory as if all tensors of a parameter had equal strides
    grads, *packed = map(_packed, (grads, *written))
    params, first, second, most = packed
    decay = float(group["lr"] * group["weight_decay"]) if cautious else 0.0
    # which weights decay is known only with the new moments, so weights are changed after these
    moved = [torch.zeros_like(param) for param in params] if decay else params
    if decay:
        settings["weight_decay"] = 0.0
    adam(moved, grads, first, second, most, steps, fused=True, **settings)
    if decay:
        _decay_cautiously(params, first, -decay)
        torch._foreach_add_(params, moved)
    for some, results in zip(written, packed, strict=True):
        if some is not results:
            torch._foreach_copy_(some, results)
    if copies:
        torch._foreach_copy_(copies, weights)


def _check_sizes(lists: Sequence[Sequence[Tensor]]) -> None:
    """Raise a ConfigurationError unless tensors of one parameter have equal sizes.

    Fused kernels would read and write beyond the smaller ones.
    """
    for row in zip(*filter(None, lists), strict=True):
        shapes = [tuple(tensor.shape) for tensor in row]
        if len(set(map(math.prod, shapes))) > 1:
            rule = f"does not fit its gradient and state, which have the shapes {shapes[1:]}"
            hint = "Build the optimizer again after a change of shape"
            raise ConfigurationError("a tensor to step", shapes[0], rule, hint)


def _in_memory_order(tensors: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return tensors of one parameter with their dimensions in the order of the first's strides.

    So dense tensors of equal strides become contiguous.
    """
    first = tensors[0]
    assert first is not None
    if first.is_contiguous():
        return tensors
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    return [
        tensor if tensor is None or tensor.shape != first.shape else tensor.permute(order)
        for tensor in tensors
    ]


def _log2(number: float) -> float:
    return math.log2(number) if number else -math.inf


def _packed(tensors: list[Tensor]) -> list[Tensor]:
    """Return contiguous copies of tensors, or the same list if all are contiguous."""
    if all(map(Tensor.is_contiguous, tensors)):
        return tensors
    return [tensor.contiguous() for tensor in tensors]


def _alike(*lists: Sequence[Tensor | None]) -> Iterator[list[list[Tensor]]]:
    """Yield the lists cut into parts of equal devices and dtypes; a list of None becomes empty."""
    if lists[0] and all(map(_are_alike, lists)):
        present: Any = [some if some and some[0] is not None else () for some in lists]
        yield list(map(list, present))
        return
    found: dict[Any, list[Any]] = {}
    for row in _rows(lists):
        key = tuple([one is not None and (one.device, one.dtype) for one in row])
        found.setdefault(key, []).append(row)
    for key, rows in found.items():
        columns = zip(key, zip(*rows, strict=True), strict=True)
        yield [list(column) if kind else [] for kind, column in columns]


def _rows(lists: Sequence[Sequence[Tensor | None]]) -> Iterator[tuple[Tensor | None, ...]]:
    """Yield the tensors at each index of some lists, None where a list is empty."""
    return zip(*(some or [None] * len(lists[0]) for some in lists), strict=True)


def _are_alike(tensors: Sequence[Tensor | None]) -> bool:
    """Return whether tensors have one device and dtype, or all are None."""
    types = set(map(type, tensors))
    if not types or type(None) in types:
        return len(types) < 2
    return len(_group_by_device_and_dtype([tensors], False)) == 1


def _is_served(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the kernels support tensors: on one GPU, contiguous, of at most 32 bits.

    Those of a list have one device and dtype.
    """
    first = lists[0][0]
    return (
        KERNELS.runs(first)
        and all(it[0].dtype.itemsize <= 4 and it[0].device == first.device for it in lists if it)
        and all(map(Tensor.is_contiguous, chain(*lists)))
    )
