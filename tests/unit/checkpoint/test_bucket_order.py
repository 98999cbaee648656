"""megatron-core's files by bucket, which name no parameters, load at other layouts."""

import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_eopt import ConfigurationError, checkpoints
from megatron_eopt.checkpoint.bucket_order import Entry, boxes_by_order
from megatron_eopt.checkpoint.buckets import BucketSpace
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.parameter_space import SavedSection
from megatron_eopt.testing.scene import forget_megatron
from tests.harness import run_ranks
from tests.unit.storage.full_state import (
    Case,
    build,
    differences,
    load,
    save,
    sharded,
    steps,
    unwrapped,
    write,
)
from tests.unit.storage.runs import MOE, REPLICATED
from tests.unit.storage.test_resharding import BF16, SMALL_BUCKETS

TIED = {**BF16, "untied": False}
OF_STOCK = [
    Case("adam", BF16, ddp=SMALL_BUCKETS, form="dp_reshardable", stock=True),
    Case("adam", TIED, form="dp_reshardable", stock=True),
    Case("adam", {**MOE, "dtype": torch.bfloat16}, form="dp_reshardable", stock=True),
]


@pytest.mark.parametrize(
    ("ranks", "layout", "readers", "other"),
    [
        (2, {"pp": 2}, 2, {"parallel": {"tp": 2}}),
        pytest.param(4, {"tp": 2, "pp": 2}, 1, {}, marks=pytest.mark.long),
        pytest.param(2, {"tp": 2}, 2, {"parallel": {"pp": 2}}, marks=pytest.mark.long),
        pytest.param(2, {}, 4, {"parallel": {"tp": 2, "pp": 2}}, marks=pytest.mark.long),
        pytest.param(4, {"tp": 2, "pp": 2}, 2, REPLICATED, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_stocks_buckets_load_at_other_layouts(tmp_path, ranks, layout, readers, other):
    cases = [replace(case, parallel=layout) for case in OF_STOCK]
    if "pp" in layout:  # where injected gradients of tied weights would differ
        cases = [case for case in cases if case.model.get("untied", True)]
    run_ranks(ranks, write_all, cases, str(tmp_path), timeout=300)
    as_written = [replace(case, stock=False) for case in cases]
    theirs = run_ranks(ranks, load, as_written, str(tmp_path), timeout=300)[0]
    ours = [replace(case, **{"parallel": {}, **other}) for case in as_written]
    loaded = run_ranks(readers, load, ours, str(tmp_path), 0, checkpoints.load, timeout=300)[0]
    for case, before, after in zip(ours, theirs, loaded, strict=True):
        assert not differences(moments(before), moments(after)), case


def write_all(cases: list[Case], folder: str) -> None:
    """For each case step twice and save."""
    for number, case in enumerate(cases):
        chunk, optimizer = build(case)
        steps(case, chunk, optimizer, 0, 2)
        write(case, chunk, optimizer, Path(folder, str(number)))
        forget_megatron()


def moments(state: dict[str, Any]) -> dict[str, Any]:
    """Return the moments of all parameters; storages call main weights differently."""
    split = {key: split_key(key) for key in state}
    found = {
        (parts.kind, parts.name): state[key]
        for key, parts in split.items()
        if parts and parts.kind in ("exp_avg", "exp_avg_sq")
    }
    assert found
    return found


def write_hashes(case: Case, folder: str) -> None:
    """Save as version 0.2.0 did, which wrote a hash of the parameters' names and no boxes."""

    def named(space: Any, _: Any) -> ShardedObject:
        return ShardedObject(
            f"optimizer.{space.params_name}", None, (1,), (0,), replica_id=space._replica
        )

    with mock.patch.object(BucketSpace, "described", named):
        write_all([case], folder)


def test_a_hash_of_names_finds_the_same_buckets_only(tmp_path):
    case = replace(OF_STOCK[0], stock=False)
    run_ranks(2, write_hashes, case, str(tmp_path))
    (written,) = run_ranks(2, load, [case], str(tmp_path))[0]
    for ddp in (case.ddp, {}):
        one = [replace(case, ddp=ddp)]
        (found,) = run_ranks(1, load, one, str(tmp_path), 0, checkpoints.load)[0]
        assert not differences(moments(written), moments(found))
    other = [replace(case, parallel={"tp": 2})]
    with pytest.raises(RuntimeError, match="fill its buckets at no layout"):
        run_ranks(2, load, other, str(tmp_path), 0, checkpoints.load)


def rewrite(case: Case, folder: str, other: str) -> None:
    """Load into megatron-core's optimizer, which must have stepped, and save again."""
    chunk, optimizer = build(case)
    steps(case, chunk, optimizer, 0, 1)
    loaded = dist_checkpointing.load(sharded(case, chunk, optimizer, is_loading=True), folder)
    unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])
    write(case, chunk, optimizer, other)


@pytest.mark.long
def test_megatron_core_reads_what_this_package_writes(tmp_path):
    stock = Case("adam", BF16, form="dp_reshardable", stock=True)
    ours = replace(stock, stock=False)
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
    saved = run_ranks(2, save, [ours], str(mine))[0]
    run_ranks(1, rewrite, stock, str(mine / "0"), str(theirs / "0"))
    read = run_ranks(1, load, [ours], str(theirs))[0]
    assert not differences(moments(saved[0]), moments(read[0]))


def load_weights_of_another(case: Case, folder: str) -> str:
    """Load the optimizer beside a model of zeros; return the error."""
    chunk, optimizer = build(case)
    for param in chunk.parameters():
        param.data.zero_()
    loaded = checkpoints.load(sharded(case, chunk, optimizer, is_loading=True), folder)
    for param in chunk.parameters():
        param.data.zero_()
    with pytest.raises(ConfigurationError) as error:
        optimizer.load_state_dict(loaded["optimizer"])
    return str(error.value)


def test_weights_are_compared(tmp_path):
    case = OF_STOCK[0]
    run_ranks(2, write_all, [case], str(tmp_path))
    ours = replace(case, stock=False)
    for ddp in ({}, SMALL_BUCKETS):  # with other buckets, and with those that were saved
        one = replace(ours, ddp=ddp)
        error = run_ranks(1, load_weights_of_another, one, str(tmp_path / "0"))[0]
        assert "the weights in its buckets are not those of the model" in error


HIDDEN, VOCABULARY, LAYERS = 8, 24, 4


def entry(name: str, *shape: int, dim: int = -1, layer: int | None = None, parts: int = 1) -> Entry:
    """Return a parameter of several parts, each of which tensor parallelism cuts by itself."""
    ones, place = ((), ()) if layer is None else ((1,), (layer,))
    height = shape[0] // parts
    sections = [
        SavedSection(
            name, (*ones, height, *shape[1:]), (*place, n * height, *(0 for _ in shape[1:]))
        )
        for n in range(parts)
    ]
    return Entry(f"{name}.{layer}", layer, "torch.bfloat16", shape, dim, tuple(sections))


def a_model() -> list[Entry]:
    found = [entry("embedding.weight", VOCABULARY, HIDDEN, dim=0)]
    for layer in range(LAYERS):
        found += [
            entry("decoder.layers.norm", HIDDEN, layer=layer),
            entry("decoder.layers.qkv", 36, HIDDEN, layer=layer, dim=0),
            entry("decoder.layers.bias", 36, layer=layer, dim=0),
            entry("decoder.layers.fc1", 40, HIDDEN, layer=layer, dim=0, parts=2),
            entry("decoder.layers.fc2", HIDDEN, 20, layer=layer, dim=1),
        ]
    return [*found, entry("final_norm", HIDDEN)]


OUTPUT = entry("output.weight", VOCABULARY, HIDDEN, dim=0)


def chunks_of(pp: int, in_stage: int, *, tied: bool) -> list[list[list[Entry]]]:
    """Return the parameters of each chunk of each stage; a last stage has a copy of tied ones."""
    model = a_model()
    tail = [model[0]] if tied and pp > 1 else [] if tied else [OUTPUT]
    count = pp * in_stage
    split: list[list[Entry]] = [[] for _ in range(count)]
    for one in [*model, *tail]:
        is_behind = one.name.startswith("final") or (one in tail and split[0])
        at = (one.layer or 0) * count // LAYERS if not is_behind else count - 1
        split[at].append(one)
    return [split[stage::pp] for stage in range(pp)]


def values_of(one: Entry) -> list[torch.Tensor]:
    """Return different values for each part of a parameter."""
    first = 1000 * (sum(map(ord, one.name)))
    return [
        first + 300 * n + torch.arange(math.prod(section.shape)).view(section.shape)
        for n, section in enumerate(one.sections)
    ]


def write_buckets(
    stages: list[list[list[Entry]]], tp: int, bucket_size: int | None, dp: int
) -> dict[str, torch.Tensor]:
    """Return the buckets that megatron-core writes, laid out by its own function."""
    buckets: dict[str, torch.Tensor] = {}
    ddp = SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)
    for rank, (stage, part) in enumerate(itertools.product(stages, range(tp))):
        for number, chunk in enumerate(stage):
            values = []
            for one in chunk:
                parts = values_of(one)
                if one.dim != -1:
                    at = one.dim - len(one.shape)
                    parts = [value.chunk(tp, at)[part] for value in parts]
                values.append(torch.cat(parts, max(one.dim, 0) - len(one.shape)))
            params = [torch.nn.Parameter(value.float()) for value in values]
            for one, param in zip(chunk, params, strict=True):
                # such weights have buckets of their own
                param.shared_embedding = one.name.startswith("embedding") and len(stages) > 1
            layout = DistributedOptimizer._compute_per_buffer_param_layout(
                params, bucket_size, dp, ddp
            )
            kind = f"gbuf_idx_{number}.dtype_(torch.bfloat16, torch.float32)"
            prefix = f"optimizer.distributed.dp_group_idx_{rank}.{kind}.bucket_idx_"
            for index, size in enumerate(layout.per_bucket_numel_unpadded):
                buckets[f"{prefix}{index}"] = torch.full((size,), -1)
            for param, value in zip(params, values, strict=True):
                first, stop, index = layout.param_index_map[param]
                first, stop = (i - layout.bucket_indices[index][0] for i in (first, stop))
                buckets[f"{prefix}{index}"][first:stop] = value.reshape(-1)
    return buckets


LAYOUTS = [(pp, in_stage) for pp in (1, 2, 4) for in_stage in (1, 2) if pp * in_stage <= LAYERS]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bucket_size", [None, 500, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_all_parameters_are_found(tp, bucket_size, tied):
    for pp, in_stage in LAYOUTS:
        stages = chunks_of(pp, in_stage if pp > 1 else 1, tied=tied)
        buckets = write_buckets(stages, tp, bucket_size, dp=3)
        shapes = {f"{name}.{kind}": tuple(b.shape) for name, b in buckets.items() for kind in "pq"}
        for ours in (1, 2):
            mine = chunks_of(ours, 1, tied=tied)
            orders = [(tuple(map(tuple, stage)), ()) for stage in mine]
            random.Random(0).shuffle(orders)
            found = boxes_by_order(shapes, orders, ())
            for one in itertools.chain(*itertools.chain(*mine)):
                for section, wanted in zip(one.sections, values_of(one), strict=True):
                    read = torch.full_like(wanted, -2)
                    for source in found[section.key]:
                        box = source.box
                        low = [a - b for a, b in zip(box.offset, section.offset, strict=True)]
                        if any(not 0 <= a < n for a, n in zip(low, section.shape, strict=True)):
                            continue  # of another layer, or of another part
                        where = [slice(a, a + n) for a, n in zip(low, box.shape, strict=True)]
                        values = buckets[source.key]
                        (first,) = source.global_offset
                        read[tuple(where)] = values.as_strided(box.shape, source.strides, first)
                    assert torch.equal(read, wanted), (pp, in_stage, ours, one.name)


def test_buckets_of_another_model_are_not_matched():
    buckets = write_buckets(chunks_of(1, 1, tied=False), 2, None, dp=2)
    shapes = {f"{name}.param": tuple(bucket.shape) for name, bucket in buckets.items()}
    stage = chunks_of(1, 1, tied=False)[0][0]
    for other in (stage[:-1], stage[1:], [*stage, entry("more", 8, 8)]):
        assert not boxes_by_order(shapes, [((tuple(other),), ())], ())
    # the state of some has names
    assert boxes_by_order(shapes, [(((*stage, entry("more", 8, 8)),), ())], {"more"})
