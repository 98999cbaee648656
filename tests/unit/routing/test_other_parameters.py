"""Gates of recurrent layers, what is no layer's weight, heads of few rows, several optimizers."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.config.settings import resolve
from megatron_eopt.fsdp2 import ParamKey, build_optimizer
from megatron_eopt.routing.model import format_routing, route_model
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.unit.fsdp2.models import config, eager, make_model, named, set_gradients
from tests.unit.storage.runs import MOE, Run, make_chunk


@eager
def built(model: nn.Module, **options: Any) -> tuple[dict[str, list[str]], list[str]]:
    """Return optimizer, weight decay and reason of each parameter, and what else is logged."""
    with listening() as lines:
        settings = options.pop("config", None) or config(print_optimizer_routing=True)
        build_optimizer(model, settings, **options)
    (table,) = (line for line in lines if line.startswith("optimizer routing"))
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[3:-2]]
    others = [line for line in lines if line is not table]
    return {row[0]: [row[2], row[5], row[6]] for row in rows}, others


CELL = {"weight_ih", "weight_hh"}


@pytest.mark.parametrize(
    ("layer", "fused"),
    [
        (nn.LSTM(8, 6), {"weight_ih_l0", "weight_hh_l0"}),
        (nn.GRU(8, 6), {"weight_ih_l0", "weight_hh_l0"}),
        (nn.GRU(8, 6, bidirectional=True, num_layers=2), {"weight_ih_l1_reverse", "weight_hh_l0"}),
        (nn.LSTM(8, 6, proj_size=4), {"weight_ih_l0", "weight_hh_l0"}),
        (nn.LSTMCell(8, 6), CELL),
        (nn.GRUCell(8, 6), CELL),
        # from elsewhere, with torch's names
        (nn.ParameterDict({n: torch.randn(18, 6) for n in CELL}), CELL),
        (nn.RNN(8, 6), set()),
        (nn.RNNCell(8, 6), set()),
    ],
)
def test_gates_of_recurrent_layers_look_fused(layer, fused):
    table, lines = built(nn.ModuleDict({"block": layer}))
    told = " ".join(line for line in lines if "look fused" in line)
    named = set(re.findall(r"weight_\w+", told))
    assert fused <= named
    assert bool(named) == bool(fused)
    assert "weight_hr_l0" not in named
    assert table[f"block.{next(iter(fused), next(iter(layer._parameters)))}"][0] == "muon"


def test_an_unknown_layer_of_three_parts_looks_fused():
    _, lines = built(nn.ModuleDict({"block": nn.ModuleDict({"qkv": nn.Linear(16, 48)})}))
    assert any("look fused" in line and "block.qkv.weight" in line for line in lines)


def test_a_projection_of_one_head_is_no_unknown_one():
    sizes = {"q_proj": 8, "k_proj": 4, "v_proj": 4}
    attention = nn.ModuleDict({name: nn.Linear(8, rows) for name, rows in sizes.items()})
    attention.head_dim = 4
    settings = config(muon_split_per_head=True, print_optimizer_routing=True)
    _, lines = built(nn.ModuleList([attention]), config=settings)
    assert not any("muon_split_per_head" in line for line in lines)


class Vision(nn.Module):
    """Parameters of up to four dimensions that no layer multiplies by, and some that one does."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, 8))
        self.query_tokens = nn.Parameter(torch.randn(1, 5, 8))
        self.cls_token = nn.Parameter(torch.randn(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.randn(1, 5, 8))
        self.grid = nn.Parameter(torch.randn(1, 8, 2, 2))
        self.logit_scale = nn.Parameter(torch.ones(()))
        self.in_proj_bias = nn.Parameter(torch.randn(2, 3, 8))
        self.norm = nn.LayerNorm((2, 3, 8))
        self.patches = nn.Conv2d(3, 8, 2)
        self.scaled = parametrizations.weight_norm(nn.Conv1d(8, 8, 2))
        self.scaled_whole = parametrizations.weight_norm(nn.Conv1d(8, 8, 2), dim=None)
        self.bilinear = nn.Bilinear(8, 6, 4)
        self.experts = nn.Module()
        self.experts.up_proj = nn.Parameter(torch.randn(2, 6, 8))
        self.table = nn.Embedding(9, 8)
        self.proj = nn.Linear(8, 8)


def test_only_weights_of_layers_and_tables_have_weight_decay():
    table, _ = built(Vision())
    none, no_layer = ("adam", "0"), "not the weight of a layer"
    raw = ("latents", "query_tokens", "cls_token", "pos_embed", "grid")
    assert {name: table.pop(name) for name in raw} == {name: [*none, no_layer] for name in raw}
    whole = "scaled_whole.parametrizations.weight.original0"
    assert table["logit_scale"] == table[whole] == [*none, "0-D"]
    assert table["in_proj_bias"] == [*none, "bias"]
    assert table["norm.weight"] == [*none, "weight of a norm"]
    scaled = "scaled.parametrizations.weight.original"
    assert table[f"{scaled}0"] == [*none, "gain of a normalized weight"]
    for name in ("patches.weight", f"{scaled}1", "bilinear.weight", "table.weight"):
        assert table[name][:2] == ["adam", "0.1"]
    assert table["experts.up_proj"] == table["proj.weight"] == ["muon", "0.1", "matrix"]
    table, _ = built(Vision(), config_overrides={ParamKey(name="pos_embed"): {"wd_mult": 1.0}})
    assert table["pos_embed"][:2] == ["adam", "0.1"]
    assert table["cls_token"][:2] == ["adam", "0"]
    table, _ = built(Vision(), config=config(print_optimizer_routing=True, muon_convolutions=True))
    assert table[whole] == [*none, "0-D"]


class Head(nn.Module):
    """DETR's head for boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4)])


def detector(**heads: nn.Module) -> nn.Module:
    layers = [nn.ModuleDict({"fc1": nn.Linear(32, 64), "fc2": nn.Linear(64, 32)}) for _ in "12"]
    router = nn.ModuleDict({"gate": nn.Linear(32, 2), "down": nn.Linear(32, 32)})
    body = {"input_proj": nn.Linear(32, 32), "layers": nn.ModuleList([*layers, router])}
    return nn.ModuleDict({"body": nn.ModuleDict(body), **heads})


@pytest.mark.parametrize(
    ("heads", "found"),
    [
        ({"class_labels_classifier": nn.Linear(32, 20), "boxes": Head()}, "boxes.layers.2"),
        # not the last ones of the model
        ({"boxes": Head(), "classes": nn.Linear(32, 32)}, "boxes.layers.2"),
        ({"boxes": nn.Linear(32, 4), "classes": nn.Linear(32, 32)}, "boxes"),
        ({"bbox_predictor": Head(), "proj": nn.Linear(32, 32)}, "bbox_predictor"),
        ({"class_embed": nn.Linear(32, 30), "bbox_embed": Head()}, "class_embed, bbox_embed"),
        ({"span_embed": nn.ModuleList([Head(), Head()])}, "span_embed"),
        ({"top": nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 7))}, "top.2"),
        ({}, ""),
        ({"classifier": nn.RNN(32, 8)}, ""),
        ({"top": nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))}, ""),
    ],
)
def test_heads_of_few_rows_get_a_line(heads, found):
    _, lines = built(detector(**heads))
    named = [line.partition(":")[0] for line in lines if "looks like an output layer" in line]
    assert all(name in ", ".join(named) for name in found.split(", "))
    assert bool(named) == bool(found)
    assert not any("body" in line for line in named)


def test_a_box_gets_its_line_beside_a_known_head():
    model = detector(classes=nn.Linear(32, 20), boxes=Head())
    table, (line,) = built(model, output_layers=["classes"])
    assert line.startswith("boxes.layers.2: looks like an output layer")
    assert line.endswith("output_layers=['classes', 'boxes.layers.2'].")
    assert table["boxes.layers.*.weight (3)"][0] == "muon"
    table, lines = built(model, output_layers=["classes", "boxes.layers.2"])
    assert table["boxes.layers.2.weight"][0] == "adam"
    assert table["boxes.layers.*.weight (2)"][0] == "muon"
    assert not lines


class Images(nn.Module):
    """A ViT's embedding of patches, or a convolutional net's stem, before other layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 16))
        self.stem = nn.Conv2d(3, 16, 4, **options)
        self.conv = nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 10)


def test_the_first_layer_gets_the_scalar_optimizer_if_it_is_a_convolution():
    settings = config(print_optimizer_routing=True, muon_convolutions=True)

    def routed(model: nn.Module) -> tuple[dict[str, list[str]], list[str]]:
        return built(model, config=settings, output_layers=["*head"])

    table, (line,) = routed(Images())
    assert table["stem.weight"] == ["adam", "0.1", "input layer"]
    assert table["conv.weight"] == ["muon", "0.1", "matrix"]
    assert line.startswith("stem.weight reads the input, so adam updates it.")
    frozen, later, declared = Images(), Images(), Images()
    frozen.stem.requires_grad_(False)
    later.pre_process = False
    declared.stem.weight.eopt_split = "whole"
    behind = nn.ModuleDict({"embedding": nn.Embedding(8, 16), "images": Images()})
    for model, name in (
        # also if the first is frozen, the next one is no input layer
        (frozen, "conv.weight"),
        # a later pipeline stage has none
        (later, "stem.weight"),
        # the override that the line names
        (declared, "stem.weight"),
        # behind another layer
        (behind, "images.stem.weight"),
    ):
        table, lines = routed(model)
        assert table[name] == ["muon", "0.1", "matrix"]
        assert not lines


def test_the_last_layer_of_a_sequential_model_gets_a_line():
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48)
    _, (line,) = built(nn.Sequential(*layers))
    assert line.startswith("2: looks like an output layer")
    _, lines = built(nn.Sequential(*layers), output_layers=["2"])
    assert not lines


def test_the_table_folds_repeated_layers_and_ends_in_sums():
    sizes = (8, 8, 8, 12)
    blocks = [nn.ModuleDict({"up": nn.Linear(8, n), "norm": nn.LayerNorm(n)}) for n in sizes]
    blocks[1]["up"].weight.use_muon = False
    model = nn.ModuleDict({"blocks": nn.ModuleList(blocks)})
    model["own"] = nn.ModuleList([nn.Linear(4, 4)])
    model["conv"] = nn.Conv2d(8, 8, 3, groups=2, bias=False)
    settings = config(muon_convolutions=True, print_optimizer_routing=True)
    with listening() as lines:
        build_optimizer(model, settings)
    (table,) = (line for line in lines if line.startswith("optimizer routing"))
    *rows, _, sums = table.splitlines()[3:]
    cells = {row.split("|")[1].strip(): row for row in rows}
    assert list(cells) == [
        *("blocks.*.up.weight (3)", "blocks.*.up.bias (4)"),
        *("blocks.*.norm.weight (4)", "blocks.*.norm.bias (4)", "blocks.1.up.weight"),
        *("own.0.weight", "own.0.bias", "conv.weight"),
    ]
    assert "8 x 8, ..." in cells["blocks.*.up.weight (3)"]
    assert "use_muon=False" in cells["blocks.1.up.weight"]
    assert "groups: weight 2 x 4 x 36" in cells["conv.weight"]
    matrices, rest = 64 + 64 + 96 + 16 + 8 * 4 * 9, 64 + 3 * 36 + 4
    assert f"muon 5 parameters, {matrices} numbers" in sums
    assert f"adam 14 parameters, {rest} numbers" in sums


@on_ranks(2)
def test_the_table_names_experts_and_leaves_out_rates_that_are_not_set():
    chunk = make_chunk(Run(model=MOE, parallel={"ep": 2}))
    settings = resolve(EmergingOptimizerConfig(optimizer="muon"))
    rows = format_routing(settings, route_model(settings, [chunk], {})).splitlines()
    assert all(("(expert)" in row) == ("local_experts" in row) for row in rows)
    assert sum("(expert)" in row for row in rows) == 2
    assert not any("None" in row for row in rows)


@eager
def test_what_another_optimizer_updates_is_not_said_to_be_lost(caplog):
    """Several may share a model, each built while the others' parameters are frozen."""
    model = make_model()
    optimizers = []
    for is_mine in (
        lambda name: name == "up.bias",
        lambda name: name not in ("up.bias", "tiny.weight"),
    ):
        for name, param in named(model).items():
            param.requires_grad_(is_mine(name))
        optimizers.append(build_optimizer(model, config()))
    for param in named(model).values():
        param.requires_grad_(True)
    set_gradients(model, 0)
    for optimizer in optimizers:
        optimizer.step()
    texts = [r.getMessage() for r in caplog.records if "frozen when" in r.getMessage()]
    assert texts
    assert all(text.startswith("tiny.weight:") for text in texts)


def test_where_no_layer_may_be_the_output_none_is_proposed():
    with pytest.raises(ConfigurationError, match=r"gives it\.$"):
        built(nn.Embedding(8, 8), output_layers=["head"])
