"""Models that are not Megatron's: what is declared counts, and what cannot be known is said."""

import logging

import pytest
import torch
from megatron.core.optimizer.optimizer_config import ParamKey
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from megatron_eopt import ConfigurationError
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.matrices import gated
from tests.harness.each_rank import on_ranks
from tests.unit.fsdp2.models import config, groups_of


class Language(nn.Module):
    """Two tables, repeated layers, and an output layer of any name."""

    def __init__(self, output: str = "", width: int = 16, words: int = 24) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(16, width)
        self.up = nn.Linear(width, words)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.down = nn.Linear(words, width)
        if output:
            self.add_module(output, nn.Linear(width, words, bias=False))


def routed(model, *, overrides=None, output_layers=None, **fields):
    """Return each parameter's group by name."""
    more = {} if output_layers is None else {"output_layers": output_layers}
    return groups_of(build_optimizer(model, config(**fields), overrides, **more))


def optimizers(model, **fields):
    return {name: group["optimizer"] for name, group in routed(model, **fields).items()}


def matrices_of(optimizer):
    """Return the names of the matrices that update rules see in the parameters."""
    schedules = (s for update_rule in optimizer.update_rules for s in update_rule.schedules)
    return [name for schedule in schedules for name in schedule.names]


# what a build marks


def test_a_build_leaves_no_marks():
    model = Language("readout")
    model.experts = nn.ParameterDict({"up": torch.ones(2, 4, 4), "bias": torch.ones(2, 4)})
    before = [set(vars(param)) for param in model.parameters()]
    first = optimizers(model, output_layers=["readout"], decoupled_lr=0.5)
    assert [set(vars(param)) for param in model.parameters()] == before
    assert first["readout.weight"] == "adam"
    assert optimizers(model, output_layers=["words"])["readout.weight"] == "muon"


def test_the_decoupled_rate_is_of_tables_and_output_layers():
    groups = routed(Language("lm_head"), decoupled_lr=0.5)
    decoupled = {name for name, group in groups.items() if group["lr"] == 0.5}
    assert decoupled == {"words.weight", "places.weight", "lm_head.weight"}
    marked = {ParamKey(attr="is_embedding_or_output_parameter"): {"max_lr": 0.25}}
    groups = routed(Language("lm_head"), overrides=marked)
    assert {n for n, group in groups.items() if group["lr"] == 0.25} == decoupled


class Numbered(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.layer_number = number
        self.linear = nn.Linear(4, 4, bias=False)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_numbers_of_layers_that_are_not_megatrons_are_their_own(first):
    model = nn.Module()
    model.layers = nn.ModuleList(Numbered(first + n) for n in range(3))
    groups = routed(model, overrides={ParamKey(name="layers.1.*"): {"max_lr": 0.5}})
    assert [name for name, g in groups.items() if g["lr"] == 0.5] == ["layers.1.linear.weight"]


# what is no matrix


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.A_log = nn.Parameter(torch.ones(8, 4))
        self.scale = nn.Parameter(torch.ones(1, 8))
        self.bias_table = nn.Parameter(torch.ones(9, 2))
        self.chosen = nn.Parameter(torch.ones(8, 4))
        self.chosen.eopt_split = "whole"
        self.liked = nn.Parameter(torch.ones(8, 4))
        self.liked.use_muon = True
        self.weight_norm = weight_norm(nn.Linear(4, 6))
        self.spectral_norm = spectral_norm(nn.Linear(4, 6))
        self.parametrized = parametrizations.weight_norm(nn.Linear(4, 6))
        self.of_columns = parametrizations.weight_norm(nn.Linear(4, 6), dim=1)
        self.table = parametrizations.spectral_norm(nn.Embedding(6, 4))
        self.fused = nn.MultiheadAttention(4, 2, bias=False)


def test_what_is_2d_but_no_layers_weight_gets_the_scalar_optimizer(caplog):
    groups = routed(Mixer(), print_optimizer_routing=True)
    by_muon = {name for name, group in groups.items() if group["optimizer"] == "muon"}
    original = "parametrizations.weight.original"
    assert by_muon == {
        "chosen",
        "liked",
        "weight_norm.weight_v",
        "spectral_norm.weight_orig",
        f"parametrized.{original}1",
        f"of_columns.{original}1",
        "fused.in_proj_weight",
        "fused.out_proj.weight",
    }
    for name in ("A_log", "scale", "bias_table", "weight_norm.weight_g", f"of_columns.{original}0"):
        assert groups[name]["weight_decay"] == 0, name
    for why in ("not the weight of a layer", "gain of a normalized weight"):
        assert why in caplog.text
    assert "adam updates them: A_log, scale. Set param.eopt_split = 'whole'" in caplog.text


def test_an_override_may_send_it_to_muon_all_the_same():
    overrides = {ParamKey(name="A_log"): {"optimizer": "muon"}}
    assert routed(Mixer(), overrides=overrides)["A_log"]["optimizer"] == "muon"


# heads


HEADS = ("score", "classifier", "v_head", "value_head", "head", "fc", "final_layer")


@pytest.mark.parametrize("name", [*HEADS, "proj_out", "readout", "of_the_tables_shape"])
def test_a_head_is_named(caplog, name):
    model = Language()
    model.add_module(name, nn.Linear(16, 24 if "shape" in name else 2))
    assert optimizers(model)[f"{name}.weight"] == "muon"
    (line,) = [text for text in caplog.messages if "looks like an output layer" in text]
    assert line.startswith(f"{name}: ")
    assert f"output_layers=['{name}']" in line
    caplog.clear()
    for pattern in (name, f"{name[:2]}*"):
        for whole, its in ((model, name), (nn.Sequential(model), f"0.{name}")):
            assert optimizers(whole, output_layers=[pattern])[f"{its}.weight"] == "adam"
    assert "looks like" not in caplog.text


def test_a_head_beside_the_output_layer_is_named_with_it(caplog):
    model = Language("lm_head")
    model.v_head = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizers(model)
    assert "output_layers=['lm_head', 'v_head']" in caplog.text


@pytest.mark.parametrize("output", ["lm_head", "output", "tied", ""])
def test_hidden_layers_of_a_tables_shape_give_no_alarm(caplog, output):
    # ``up`` and ``layers`` have the shapes of ``words`` and ``places``
    model = Language(output)
    if output == "tied":
        model.tied.weight = model.words.weight
    optimizers(model)
    assert "looks like an output layer" not in caplog.text


# sparse gradients


def test_sparse_gradients_are_refused_where_they_are_known():
    for table in (nn.Embedding(6, 4, sparse=True), nn.EmbeddingBag(6, 4, sparse=True)):
        model = nn.ModuleDict({"words": table, "hidden": nn.Linear(4, 4)})
        with pytest.raises(ConfigurationError, match=r"words.sparse=True: sparse gradients"):
            build_optimizer(model, config())
        table.requires_grad_(False)
        build_optimizer(model, config())


def test_a_sparse_gradient_that_comes_later_is_named():
    model = nn.ModuleDict({"words": nn.Embedding(6, 4), "hidden": nn.Linear(4, 4)})
    optimizer = build_optimizer(model, config())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model["words"].weight.grad = torch.ones(6, 4).to_sparse()
    with pytest.raises(ConfigurationError, match=r"gradient of words.weight.*sparse"):
        optimizer.step()


# declarations


@pytest.mark.parametrize("way", ["fully_shard", "tensor parallel", "to_empty"])
@on_ranks(2, cpu=False)
def test_what_is_declared_before_sharding_counts(way):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with torch.device("meta" if way == "to_empty" else "cpu"):
        model = nn.Module()
        model.fused, model.kept = nn.Linear(4, 8, bias=False), nn.Linear(4, 4, bias=False)
        model.stack = nn.Conv1d(4, 6, 2, bias=False)
    model.fused.weight.eopt_split = gated((8, 4))
    model.kept.weight.use_muon = False
    model.stack.weight.eopt_split = "whole"
    if way == "tensor parallel":
        parallelize_module(model, mesh["tp"], {"fused": ColwiseParallel()})
    for module in (model.fused, model):
        fully_shard(module, mesh=mesh["dp" if way == "tensor parallel" else "tp"])
    if way == "to_empty":
        model.to_empty(device="cpu")
    optimizer = build_optimizer(model, config())
    found = {name: group["optimizer"] for name, group in groups_of(optimizer).items()}
    assert found == {"fused.weight": "muon", "kept.weight": "adam", "stack.weight": "muon"}, found
    matrices = set(matrices_of(optimizer))
    assert matrices == {"fused.weight[gate]", "fused.weight[up]", "stack.weight"}, matrices


# heads of attention


class Attention(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        vars(self).update(attributes)
        self.q_proj, self.o_proj = nn.Linear(8, 16), nn.Linear(16, 8)
        self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8)


def heads_of(model):
    optimizer = build_optimizer(model, config(muon_split_per_head=True), output_layers=())
    names = matrices_of(optimizer)
    return [sum(name.startswith(f"{part}_proj.weight") for name in names) for part in "qkvo"]


@pytest.mark.parametrize(
    "attributes",
    [{"head_dim": 4}, {"num_heads": 4, "num_key_value_heads": 2}, {"n_heads": 4, "n_kv_heads": 2}],
)
def test_separate_projections_are_split_into_heads(caplog, attributes):
    assert heads_of(Attention(**attributes)) == [4, 2, 2, 1]
    assert "per_head" not in caplog.text


def test_heads_that_cannot_be_known_are_said(caplog):
    with caplog.at_level(logging.WARNING):
        assert heads_of(Attention()) == [1, 1, 1, 1]
    assert "muon_split_per_head=True: the heads of these weights are not known" in caplog.text
    assert "q_proj.weight, k_proj.weight, v_proj.weight" in caplog.text
    caplog.clear()
    build_optimizer(nn.Linear(4, 4), config(muon_split_per_head=True))
    assert "no attention projection was found" in caplog.text
