"""Finds a model's fused weights, which hold several matrices each, and how to split them.

Without one of these attributes on the parameter, the module's type decides:

* ``param.eopt_split = Split(...)``, for the unsharded shape: these parts;
* ``param.eopt_split = "whole"``: one matrix (per expert, per group of a convolution);
* ``param.eopt_split = "transposed"``: the same, stored with its input dimension first;
* ``param.is_qkv = True`` with ``param.qkv_split_shapes = [q, k, v]`` (or ``[q, gate, k, v]``), the
  rows of one query group: megatron-core's convention, used if ``"qkv"`` is on.
"""

import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.place import is_part, parallel_state, whole_shape
from megatron_eopt.matrices import Split, SplitT, checked_shape, local_shape, qkv, whole
from megatron_eopt.matrices import transposed as turned
from megatron_eopt.routing import known_megatron, known_transformers
from megatron_eopt.routing.parameters import cut_dimension
from megatron_eopt.routing.places import HeldParameter, conv_shape
from megatron_eopt.routing.plain_names import is_a
from megatron_eopt.routing.routers import EXPERT_COUNTS

logger = logging.getLogger(__name__)

QKV_TAG = "eopt_tagged_qkv_split_shapes"
"""Attribute that holds a parameter's ``qkv_split_shapes`` if routing set them, not the user."""

# Names of fused projections in megatron-core and in models ported to it.
_FUSED_NAME = re.compile(
    r"(linear_)?(qkv|kv|wqkv)(_down)?(_proj)?|in_proj(_\w+)?|gate_up_proj|w13|c_attn|query_key_value"
)

# Names of weights in recurrent layers.
_RECURRENT = re.compile(r"weight_(ih|hh)(?=_|$)")

NO_ORDER = "inputs or outputs first?"
"""Kind of split of experts' weights of classes that are not known."""

_WORDS = ("whole", "transposed")
"""Declarations that name no parts."""


def find_splits(
    places: Iterable[HeldParameter],
    *,
    which: Collection[SplitT],
    unsplit: Container[nn.Parameter] = (),
    flattened: Container[nn.Parameter] = (),
) -> dict[nn.Parameter, Split]:
    """Return the splits of fused trainable weights, and warn of unknown layouts.

    Args:
        places: Where the model has its parameters.
        which: Kinds of splits that are turned on.
        unsplit: Weights that are split only if they declare it.
        flattened: Weights of convolutions that are flattened although they do not declare it.

    Returns:
        Splits of *unsharded* shapes, always with 3-D expert weights. All others are one matrix.

    Raises:
        ConfigurationError: If a weight and its split do not fit.
    """
    unknown: list[str] = []
    weights = list(_weights(places, flattened))
    splits = {
        weight.param: _split_of(weight, () if weight.param in unsplit else which, unknown)
        for weight in weights
    }
    if unknown:
        logger.warning(
            "These weights look fused, but their layout is unknown, so each is updated as one "
            "matrix: %s. Set param.eopt_split, for example to "
            "megatron_eopt.matrices.qkv(param.shape, [q_rows, k_rows, v_rows]), or to 'whole'.",
            of_all_layers(unknown),
        )
    if "per_head" in which:
        _warn_of_heads(weights, splits)
    return {param: split for param, split in splits.items() if split is not None}


def of_all_layers(names: Iterable[str]) -> str:
    """Return a list of names for a message, with one name for all layers."""
    return ", ".join(dict.fromkeys(map(layer_kind, names)))


def layer_kind(name: str) -> str:
    """Return a parameter's name with ``*`` in place of the numbers of layers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def declared_qkv(param: nn.Parameter) -> list[int] | None:
    """Return the rows of Q, K and V that the user declared on a parameter, or None."""
    rows: list[int] | None = getattr(param, "qkv_split_shapes", None)
    # ``is not``: equal rows that a user has set are another list than the one that routing set
    is_declared = getattr(param, "is_qkv", False) and rows is not getattr(param, QKV_TAG, None)
    return rows if is_declared else None


def tensor_parallel_cut(param: Tensor, *modules: nn.Module) -> tuple[int, int]:
    """Return ``(tp_size, partition_dim)`` of a weight, ``(1, -1)`` if it is not sharded.

    The group is that of the first of ``modules`` that has one, else megatron-core's global group.
    """
    dim = cut_dimension(param)
    if dim == -1 or is_part(param):
        return 1, -1
    for module in modules:
        group = getattr(module, "tp_group", None) or getattr(module, "_tp_group", None)
        if group is not None:
            return group.size(), dim
    state = parallel_state()
    if state is None or not state.model_parallel_is_initialized():
        rule = "the weight is sharded, but its tensor-parallel group is unknown"
        hint = "Initialize megatron.core.parallel_state or give the module a tp_group"
        raise ConfigurationError("partition_dim", dim, rule, hint)
    if getattr(param, "allreduce", True):
        return state.get_tensor_model_parallel_world_size(), dim
    return state.get_expert_tensor_parallel_world_size(), dim


def _weights(
    places: Iterable[HeldParameter], flattened: Container[nn.Parameter]
) -> Iterator[HeldParameter]:
    """Yield once each trainable weight of two or three dimensions, and what is to be flattened."""
    seen: set[int] = set()
    for place in places:
        param = place.param
        if id(param) in seen or place.is_gain:
            continue
        declared = getattr(param, "eopt_split", None) is not None or param in flattened
        is_plain = place.dims in (2, 3) and place.convolution is None
        if (declared or is_plain) and param.requires_grad:
            seen.add(id(param))
            yield place


def _split_of(weight: HeldParameter, which: Collection[SplitT], unknown: list[str]) -> Split | None:
    """Return one weight's split, None for one matrix; add unknown layouts to ``unknown``."""
    declared = getattr(weight.param, "eopt_split", None)
    if isinstance(declared, Split):
        if _is_packed(weight.param):
            rule = "packed tensor parallelism shards this weight and reorders its rows"
            raise ConfigurationError(weight.name, declared, rule, "Remove the declared split")
        return _fitted(weight, lambda _: declared)
    if declared not in (None, *_WORDS):
        rule = "must be a megatron_eopt.matrices.Split, 'whole' or 'transposed'"
        argument = f"{weight.name}.eopt_split"
        raise ConfigurationError(argument, declared, rule, "Set one of these")
    is_convolution = weight.convolution is not None
    inputs_come_first = _inputs_first(weight)
    first = declared == "transposed" or bool(inputs_come_first)
    if declared is None and not is_convolution:
        lengths = declared_qkv(weight.param)
        if lengths is not None:
            return _fitted(weight, lambda shape: qkv(shape, lengths)) if "qkv" in which else None
        fused = _fused_weight(weight)
        if fused is not None and fused.kind in which and not _is_packed(weight.param):
            more = fused.per_head if "per_head" in which else {}
            build = functools.partial(fused.build, **more)
            return _fitted(weight, _turned(build) if first else build, fused.rows)
        if fused is None and _looks_fused(weight):
            unknown.append(weight.name)
    is_te = is_a(weight.module, "transformer_engine", "GroupedLinear")
    grouped = is_te or is_a(weight.owner, "megatron", "TEGroupedMLP")
    if declared is None and inputs_come_first is None and weight.is_stack and not grouped:
        return _fitted(weight, lambda shape: replace(whole(shape), kind=NO_ORDER))
    if is_convolution:
        return _fitted(weight, _turned(_of_convolution) if first else _of_convolution)
    if first or ((declared or grouped) and weight.dims != 2):
        return _fitted(weight, _turned(whole) if first else whole)
    return None


def _of_convolution(shape: tuple[int, ...]) -> Split:
    """Return the split of a convolution, whose groups are a matrix each."""
    split = whole(shape)
    return replace(split, kind="groups") if len(shape) == 3 else split


def _inputs_first(weight: HeldParameter) -> bool | None:
    """Whether a weight's inputs come first; None if no table knows its module."""
    if weight.convolution is not None:
        return isinstance(weight.convolution, _ConvTransposeNd)
    return known_transformers.inputs_first(weight.module, weight.dims)


def _fused_weight(weight: HeldParameter) -> known_megatron.FusedWeight | None:
    """Return how a weight is fused; None if it is one matrix or unknown."""
    layer = (weight.owner, weight.child, weight.module)
    fused = known_megatron.fused_weight(*layer)
    # of Megatron's own modules, all fused weights are known
    if fused is not None or type(weight.owner).__module__.startswith("megatron."):
        return fused
    if (own := known_transformers.own_weight(weight.module, weight.leaf)) is not None:
        return own
    return known_transformers.fused_weight(*layer)


def _turned(build: Callable[[tuple[int, ...]], Split]) -> Callable[[tuple[int, ...]], Split]:
    """Return what builds the split of a weight that stores its inputs first."""
    return lambda shape: turned(build((*shape[:-2], shape[-1], shape[-2])))


def _fitted(
    weight: HeldParameter, build: Callable[[tuple[int, ...]], Split], rows: int | None = None
) -> Split:
    """Build a split for the unsharded shape (``rows`` rows, if given); check this rank's shard."""
    local = _seen_shape(weight)
    size, dim = tensor_parallel_cut(weight.param, weight.module, weight.owner)
    shape = list(local)
    if dim != -1:
        # from the end, because weights of experts have a leading dimension
        shape[dim - 2] *= size
    if rows is not None:
        # a module knows its rows; a shard that does not fit them raises below
        shape[-2] = rows
    try:
        split = build(tuple(shape))
        expected = local_shape(split, size, dim)
    except ConfigurationError as error:
        rule = f"cannot be split, because {str(error).rstrip('.')}"
        hint = "Correct the declared split of this weight, or turn off this kind of split"
        raise ConfigurationError(weight.name, local, rule, hint) from error
    if local != expected and not _is_view(weight, split):
        rule = f"must have the shape {expected} of the {split.kind} split {split.describe()}"
        hint = (
            "Declare a split for this weight, or turn off this kind of split. If this rank has a "
            "part that you have cut, set param.eopt_place"
        )
        raise ConfigurationError(weight.name, local, rule, hint)
    return split


def _seen_shape(weight: HeldParameter) -> tuple[int, ...]:
    """Return the shape in which a weight's matrices lie."""
    local, convolution = whole_shape(weight.param), weight.convolution
    if convolution is not None:
        return conv_shape(convolution, local)
    return local if len(local) <= 3 else checked_shape(local)


def _is_view(weight: HeldParameter, split: Split) -> bool:
    """Whether a split that was declared for a convolution sees its weight as other matrices."""
    shape = whole_shape(weight.param)
    folded = [(math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in range(1, len(shape))]
    rows = split.experts * split.rows
    return weight.convolution is not None and (rows, split.cols) in folded


def _warn_of_heads(
    weights: Iterable[HeldParameter], splits: Mapping[nn.Parameter, Split | None]
) -> None:
    """Warn of attention projections whose heads are not known, or if there are none at all."""
    by_head = {param for param, split in splits.items() if split is not None and split.is_by_head}
    missing = [
        weight.name
        for weight in weights
        if weight.param not in by_head
        and known_transformers.looks_like_heads(weight.owner, weight.child)
    ]
    if missing or not by_head:
        logger.warning(
            "muon_split_per_head=True: %s. Set param.eopt_split to a Split with the heads' rows, "
            "such as matrices.per_head(weight.shape, head_dim).",
            f"the heads of these weights are not known, so they stay whole: {', '.join(missing)}"
            if missing
            else "no attention projection was found",
        )


def _is_packed(param: nn.Parameter) -> bool:
    """Whether each rank holds rows of several parts, as ``packed_colwise`` of transformers cuts."""
    placements = getattr(param, "placements", ())
    cuts = [(type(cut).__name__, getattr(cut, "dim", 0)) for cut in placements]
    # where FSDP has cut what tensor parallelism did, a plain shard is beside the strided one
    return any(kind == "_StridedShard" and ("Shard", dim) not in cuts for kind, dim in cuts)


def _looks_fused(weight: HeldParameter) -> bool:
    """Tell by names and megatron-core's partition attributes whether a weight looks fused."""
    names = (weight.child, weight.leaf.removesuffix("_weight"))
    return (weight.dims == 2 or weight.is_stack) and (
        any(map(_FUSED_NAME.fullmatch, names))
        or _has_gates(weight)
        or _has_experts(weight)
        or len(getattr(weight.param, "partition_sizes", None) or ()) > 1
        or getattr(weight.param, "partition_stride", 1) > 1
    )


def _has_gates(weight: HeldParameter) -> bool:
    """Whether it is a recurrent layer's, with several gates, as LSTM and GRU have."""
    if not _RECURRENT.match(weight.leaf):
        return False
    # it has as many rows as the one that multiplies the state, which without gates is square
    params = dict(weight.module.named_parameters(recurse=False))
    state = params.get(_RECURRENT.sub("weight_hh", weight.leaf))
    return state is not None and whole_shape(state)[0] > whole_shape(state)[-1]


def _has_experts(weight: HeldParameter) -> bool:
    """Whether it is 2-D, but has rows of several experts, whose number its module gives."""
    counts = (getattr(weight.module, name, None) for name in EXPERT_COUNTS)
    count = next((n for n in counts if isinstance(n, int)), 1)
    if count <= 1 or weight.dims != 2:
        return False
    rows = whole_shape(weight.param)[0]
    is_cut = count < rows and rows % count == 0
    return is_cut and weight.is_of_experts and not weight.why_vector
