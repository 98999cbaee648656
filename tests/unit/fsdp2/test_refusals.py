"""What cannot be honoured is refused when the optimizer is built, with a way out."""

import copy
import pickle
import sys
import types
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_eopt import EmergingOptimizerConfig, TensorParallelMuon
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.config import checks
from megatron_eopt.config.registry import EmergingOptimizerEntry, registered
from megatron_eopt.extending import MuonRule
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.state.whole_matrix_state import _describe
from megatron_eopt.storage import uneven
from tests.harness.each_rank import on_ranks
from tests.harness.log import listening
from tests.harness.megatron import initialize_megatron
from tests.unit.fsdp2.models import config, cut, eager, make_model, stepped

REFUSED = [
    # fields of the configuration, arguments, where the model is, and what is said
    ({"fp16": True}, {}, "cpu", r"fp16=True: needs a loss scale"),
    ({"muon_tp_mode": "blockwise"}, {}, "cpu", r"muon_tp_mode='blockwise': would orthogonalize"),
    ({"muon_skip_grad_clip": True}, {}, "cpu", r"skip_grad_clip=True: is not supported"),
    ({"grad_norm_skip_threshold": 0.0}, {}, "cpu", r"skip_threshold=0.0: works with get_meg"),
    ({}, {}, "meta", r"has no storage yet. Call model.to_empty"),
    (
        {},
        {"output_layers": ["classifier"]},
        "cpu",
        r"none of these patterns matches.*such as 'lm_head'",
    ),
]


@pytest.mark.parametrize(("fields", "arguments", "device", "message"), REFUSED)
def test_what_has_no_meaning_here(fields, arguments, device, message):
    with pytest.raises(ConfigurationError, match=message):
        build_optimizer(make_model().to(device), config(**fields), **arguments)


@pytest.mark.parametrize(
    ("layout", "hint"),
    [
        ("optim_grads_params", "Use build_optimizer of megatron_eopt.megatron_fsdp"),
        ("units", "Import megatron_eopt.contrib.megatron_fsdp_v2 before"),
    ],
)
@on_ranks(1)
@eager
def test_what_megatron_fsdp_shards_needs_its_import(layout, hint):
    with mock.patch.object(uneven, "_kinds", []):
        assert hint in refused(cut(make_model(), layout, "up"), config())


def refused(model, settings):
    with pytest.raises(ConfigurationError) as error:
        build_optimizer(model, settings)
    return str(error.value)


@on_ranks(2, cpu=False)
def test_ranks_that_differ_and_parameters_beside_the_mesh():
    triple = (2.0, -1.5, 0.5 - 0.1 * dist.get_rank())
    for name, fields in (
        ("lr=", {"lr": 0.1 * (1 + dist.get_rank())}),
        ("muon_coefficient_type=((", {"muon_coefficient_type": triple}),
    ):
        error = refused(make_model("fsdp"), config(**fields))
        assert name in error, error
        assert "is not the same on all ranks" in error, error
    for name in checks._PRINT:
        # what only prints may differ
        build_optimizer(make_model("fsdp"), config(**{name: dist.get_rank() == 0}))
    plain = make_model("fsdp")
    plain.extra = torch.nn.Linear(4, 4)
    error = refused(plain, config())
    assert error.startswith("extra.weight=(4, 4): is a plain tensor among DTensors"), error
    plain.extra.requires_grad_(False)
    build_optimizer(plain, config())


@on_ranks(2)
def test_a_mesh_without_the_tensor_parallel_dimension():
    initialize_megatron(tp=2)
    model = make_model("fsdp")
    model.up.weight.tensor_model_parallel = True
    model.up.weight.partition_dim = 0
    error = refused(model, config())
    assert "lacks the 2 tensor-parallel ranks that cut dimension 0" in error, error


@pytest.mark.parametrize(
    "model", [make_model().parameters(), list(make_model().parameters()), None]
)
def test_parameters_in_place_of_the_model(model):
    with pytest.raises(ConfigurationTypeError, match="Pass the model itself"):
        build_optimizer(model, config("muon"))


def test_a_misspelled_field_is_answered_with_similar_ones():
    @dataclass
    class Own(EmergingOptimizerConfig):
        bounded_muon_limit: float = 0.1

    cases = {"muon_momentun": "Did you mean muon_momentum", "wheight_decay": "weight_decay"}
    for name, words in (cases | {"zebra": "Leave it out", "bounded_limit": "bounded_muon"}).items():
        with pytest.raises(ConfigurationTypeError, match=rf"{name}=1 .*{words}"):
            Own(**{name: 1})
    found = copy.deepcopy(replace(Own(optimizer="muon", bounded_muon_limit=0.2), lr=1.0))
    assert pickle.loads(pickle.dumps(EmergingOptimizerConfig(optimizer="soap"))).optimizer == "soap"
    assert (found.optimizer, found.bounded_muon_limit, found.lr) == ("muon", 0.2, 1.0)


def test_deepspeed_is_refused_by_name(monkeypatch):
    engine = type("DeepSpeedEngine", (torch.nn.Module,), {"__module__": "deepspeed.runtime.engine"})
    assert refused(engine(), config()).startswith("DeepSpeed=True: its ZeRO flattens weights")
    model = make_model()
    model.up.weight.ds_id = 0  # as a weight that ZeRO-3 has taken apart
    assert refused(model, config()).startswith("DeepSpeed=True")
    # an optimizer that is given to it gets flat tensors in its groups
    model = make_model()
    optimizer = build_optimizer(model, config())
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.zeros(100))]
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    with pytest.raises(ConfigurationError, match=r"^DeepSpeed=True.* Use FSDP2 or DDP"):
        optimizer.step()


def test_processes_that_train_alone_are_told_so(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with listening() as lines:
        build_optimizer(make_model(), config())
    assert any("WORLD_SIZE is 2, but processes are not connected" in line for line in lines)


def test_float16_weights_are_named_since_they_are_rounded():
    for dtype, count in ((torch.float16, 1), (torch.bfloat16, 0), (torch.float32, 0)):
        with listening() as lines:
            build_optimizer(make_model().to(dtype), config())
        assert sum("float16 weights are rounded after each step" in line for line in lines) == count


class OwnDirections(MuonRule):
    """Reads momenta by itself, which it can only in float32."""

    def _directions(self, items, arriving, outs):
        return super()._directions(items, arriving, outs)


class OwnDirectionsMuon(TensorParallelMuon):
    update_rule_class = OwnDirections


@pytest.mark.parametrize("momentum", ["fp32", "int8"])
def test_own_directions_with_rounded_momentum_get_a_line(momentum):
    entry = EmergingOptimizerEntry(
        OwnDirectionsMuon, state_layout="matrix_update", prefixes=("muon",)
    )
    with registered("own", entry), listening() as lines:
        build_optimizer(make_model(), config("own", muon_momentum_dtype=momentum))
        build_optimizer(make_model(), config("adaptive_muon", muon_momentum_dtype=momentum))
    said = [line for line in lines if "OwnDirections overrides _directions" in line]
    assert len(said) == (momentum == "int8")
    assert not any("overrides _directions" in line for line in lines if line not in said)


def test_a_function_for_state_that_nothing_calls_is_refused():
    how = {"state_layout": "matrix_update", "prefixes": ("muon",)}
    told = r"init_state_fn=.*is not called with state_layout"
    with pytest.raises(ConfigurationError, match=told):
        EmergingOptimizerEntry(OwnDirectionsMuon, init_state_fn=lambda *_: None, **how)


def test_state_that_checkpoints_cannot_hold_is_named():
    values = [torch.zeros(2), torch.zeros(2).double(), torch.zeros(()).double(), 1.5, True, "text"]
    problems = [_describe(0, "kept", 0, value).problem for value in values]
    assert problems == ["", "torch.float64", "", "", "", "str"]
    model = make_model()
    optimizer = build_optimizer(model, config("soap"))
    stepped(model, optimizer, 0)
    rule = next(item.rule for item in optimizer.assigned if item.rule.name == "SOAP")
    next(iter(rule.owned_state.values()))["kept"] = "text"
    with pytest.raises(ConfigurationError, match=r"state 'gate/kept'.*='str': only float32"):
        optimizer.state_dict()
