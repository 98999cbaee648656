"""Fused projections of attention in torch, timm and transformers are split as they are read."""

import ast
import importlib
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.matrices import matrix_rows
from megatron_eopt.routing.known_transformers import _GATED_QUERIES, _THIRDS
from megatron_eopt.routing.places import places_in
from megatron_eopt.routing.splits import find_splits
from tests.harness.log import listening
from tests.unit.fsdp2.models import config
from tests.unit.routing.test_known_transformers import Tiny, classes_of, make

pytest.importorskip("timm")

THIRDS = re.compile(
    r"(reshape|view)\([^)]*\b3,\s*(self\.)?(num_heads|heads|groups)|chunk\(3, dim=2"
)
"""How a forward pass cuts outputs into queries, keys and values before it cuts these into heads."""
ELSEWHERE = {
    # these also have `q`, `k` and `v` in place of `qkv`, or no keys, by their arguments
    ("timm.layers.attention_pool2d", "RotAttentionPool2d"),
    ("timm.layers.attention_pool2d", "AttentionPool2d"),
    ("timm.models.gcvit", "WindowAttentionGlobal"),
    # by heads, unless an argument says otherwise
    ("timm.models.maxxvit", "AttentionCl"),
}


def classes() -> Iterator[tuple[str, str, str]]:
    """Yield the classes of timm with a linear ``qkv``: module, name and source."""
    for home, tree, text in classes_of("timm", "**/*.py", "self.qkv"):
        source = ast.get_source_segment(text, tree) or ""
        if "self.qkv = nn.Linear(" in source:
            yield home, tree.name, source


def test_the_table_has_timms_classes_with_queries_before_keys_before_values():
    listed = {(home, name) for home, names in _THIRDS.items() for name in names}
    found = {(home, name) for home, name, source in classes() if THIRDS.search(source)}
    assert found - ELSEWHERE == listed
    for home, name in listed:
        assert hasattr(importlib.import_module(home), name)


def rows_of(model: nn.Module) -> dict[str, list[list[int]]]:
    """Return the rows of each matrix of the fused weights."""
    places = places_in([model])
    splits = find_splits(places, which={"qkv"})
    return {
        place.name: [
            [row for first, _, count in runs.triples() for row in range(first, first + count)]
            for runs in matrix_rows(splits[place.param])
        ]
        for place in places
        if place.param in splits
    }


def attention(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 12)
    if kind == "torch":
        return nn.MultiheadAttention(12, 3, batch_first=True, bias=False), x
    name, home = {
        "vit": ("Attention", "timm.layers.attention"),
        "swin": ("WindowAttention", "timm.models.swin_transformer"),
        "beit": ("Attention", "timm.models.beit"),
    }[kind]
    more = {"window_size": (2, 2)} if kind == "swin" else {}
    module: nn.Module = getattr(importlib.import_module(home), name)(12, 3, qkv_bias=False, **more)
    return module, x


@pytest.mark.parametrize("kind", ["torch", "vit", "swin", "beit"])
def test_the_parts_are_queries_keys_and_values(kind):
    module, x = attention(kind)
    module.eval()
    (name, parts), *others = rows_of(module).items()
    assert not others
    weight = dict(module.named_parameters())[name]

    def without(*rows: int) -> torch.Tensor:
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[list(rows)] = 0.0
            found = module(x, x, x)[0] if kind == "torch" else module(x)
            weight.copy_(kept)
        return found

    queries, keys, values = (without(*rows) for rows in parts)
    # without queries or without keys, all keys weigh the same; without values there is nothing
    assert torch.allclose(queries, keys, atol=1e-6)
    assert not torch.allclose(queries, values, atol=1e-3)
    assert torch.allclose(values, values[:1, :1].expand_as(values), atol=1e-6)


@pytest.mark.parametrize("kind", ["torch", "vit", "swin", "beit"])
@pytest.mark.parametrize("per_head", [False, True])
def test_no_warning_is_left(kind, per_head):
    module, _ = attention(kind)
    with listening() as lines:
        optimizer = build_optimizer(nn.Sequential(module), config(muon_split_per_head=per_head))
    assert not any("look fused" in line for line in lines), lines
    (rule,) = (rule for rule in optimizer.update_rules if hasattr(rule, "exchange"))
    (shapes,) = (its for its in rule.shapes if len(its) > 1)
    assert shapes == ([(4, 12)] * 9 if per_head else [(12, 12)] * 3)


class Heads(Tiny):
    """A configuration of attention with three heads of four."""

    head_dim, num_attention_heads, num_key_value_heads = 4, 3, 1


def test_queries_and_gates_alternate_by_head():
    pattern = re.compile(r"q_proj\(\w+\)\.view\([^)]*head_dim \* 2\)")
    found = {
        tree.name: home
        for home, tree, text in classes_of(word="head_dim * 2")
        if pattern.search(ast.get_source_segment(text, tree) or "")
    }
    assert found.keys() == set(_GATED_QUERIES)
    for name, home in found.items():
        module = make(home, name, Heads)
        (parts,) = (rows for leaf, rows in rows_of(module).items() if "q_proj" in leaf)
        numbers = torch.arange(module.q_proj.weight.shape[0])
        queries, gates = numbers.view(-1, module.head_dim * 2).chunk(2, dim=-1)
        assert parts == [queries.flatten().tolist(), gates.flatten().tolist()], name
