"""A parameter is called the same however its model is wrapped, in groups, state and overrides."""

import copy
import itertools

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import ParamKey, build_optimizer
from megatron_eopt.routing.plain_names import match_names, plain_names
from tests.harness.each_rank import on_ranks
from tests.harness.tiers import mostly_long
from tests.unit.fsdp2.models import FORMS, config, eager, far, gradient, groups_of, load, whole

OPTIMIZERS = ("muon", "soap", "adam")


class Module(nn.Module):
    """A module that a user calls ``module``, beside others, and one that holds nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(6, 4)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.own = Module()
        self.norm = nn.LayerNorm(8)


def checkpointed(model):
    # as torchtitan and torch's tutorials wrap
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Sequential))
    return model


def checkpointed_in_part(model):
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    return model


def compiled_in_part(model):
    model.layers[1] = torch.compile(model.layers[1])
    model.own.module = torch.compile(model.own.module)
    return model


def sharded(model):
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return model


WRAPPINGS = {
    "plain": lambda model: model,
    "checkpointed": checkpointed,
    "checkpointed in part": checkpointed_in_part,
    "compiled": torch.compile,
    "compiled in part": compiled_in_part,
    "DDP": DistributedDataParallel,
    "DataParallel": DataParallel,
    "fully_shard": lambda model: sharded(checkpointed(model)),
    "all": lambda model: DistributedDataParallel(torch.compile(checkpointed(model))),
}


def wrapped(wrapping, optimizer="muon", overrides=None):
    model = WRAPPINGS[wrapping](Model())
    return model, build_optimizer(model, config(optimizer), overrides)


def step(optimizer, number):
    for param, name in optimizer.names.items():
        plain = name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")
        grad = gradient(plain.removeprefix("module."), param.shape, number)
        param.grad = torch.zeros_like(param) if hasattr(param, "placements") else grad
        if hasattr(param, "placements"):
            param.grad.to_local().copy_(grad)
    optimizer.step()


def weights(optimizer):
    return [whole(param) for param in optimizer.names]


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, "muon"))
@on_ranks(1, cpu=False)
@eager
def test_a_run_goes_on_with_any_wrapper_on_or_off(name):
    overrides = {ParamKey(name="layers.0.*"): {"max_lr": 0.5}}
    wrong = []
    for before, after in [(w, "plain") for w in WRAPPINGS] + [("plain", w) for w in WRAPPINGS]:
        # torch itself does not load what it calls otherwise
        for form in FORMS[:1] if "DataParallel" in (before, after) else FORMS:
            model, optimizer = wrapped(before, name, overrides)
            other, following = wrapped(after, name, overrides)
            for number in range(2):
                step(optimizer, number)
            saved = copy.deepcopy(form(model, optimizer))
            with torch.no_grad():
                for mine, its in zip(following.names, weights(optimizer), strict=True):
                    (mine.to_local() if hasattr(mine, "placements") else mine).copy_(its)
            try:
                load(form, other, following, saved)
            except Exception as error:  # any error is a failure to report
                wrong.append((before, after, form.__name__, repr(error)))
                continue
            for its in (optimizer, following):
                step(its, 2)
            found = dict(enumerate(weights(following)))
            if far(found, dict(enumerate(weights(optimizer))))[0] > 0:
                wrong.append((before, after, form.__name__))
    assert not wrong, wrong


@on_ranks(1, cpu=False)
def test_names_are_those_of_the_model_and_of_torchs_checkpoints():
    own = {name for name, _ in Model().named_parameters()}
    for wrapping in WRAPPINGS:
        model, optimizer = wrapped(wrapping)
        step(optimizer, 0)
        names = set(optimizer.names.values())
        fqns = set(get_optimizer_state_dict(model, optimizer)["state"])
        # torch does not know DataParallel
        torchs = {f"module.{name}" for name in own} if wrapping == "DataParallel" else own
        assert (names, fqns) == (own, torchs), (wrapping, names, fqns)


PATTERNS = [
    "layers.0.*",
    "module.layers.0.*",
    "_orig_mod.layers.0.*",
    "layers.0._checkpoint_wrapped_module.*",
    "module._orig_mod.layers.0._checkpoint_wrapped_module.*",
]


def of_a_rate(optimizer, rate):
    return {name for name, group in groups_of(optimizer).items() if group["lr"] == rate}


@on_ranks(1, cpu=False)
def test_overrides_match_with_any_wrapper_on_or_off():
    for wrapping, pattern in itertools.product(WRAPPINGS, PATTERNS):
        _, optimizer = wrapped(wrapping, "muon", {ParamKey(name=pattern): {"max_lr": 0.5}})
        found = of_a_rate(optimizer, 0.5)
        assert found == {"layers.0.0.weight", "layers.0.0.bias"}, (wrapping, pattern, found)


class WithModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)


def test_a_pattern_for_a_users_own_module_matches_only_that():
    plain, in_wrapper = WithModule(), DataParallel(WithModule())
    for model, pattern in ((plain, "module.*"), (in_wrapper, "module.module.*")):
        optimizer = build_optimizer(model, config(), {ParamKey(name=pattern): {"max_lr": 0.5}})
        assert of_a_rate(optimizer, 0.5) == {"module.weight", "module.bias"}


def test_a_pattern_matches_a_parametrized_weight():
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))
    optimizer = build_optimizer(model, config(), {ParamKey(name="weight"): {"max_lr": 0.5}})
    assert [group["lr"] for group in optimizer.param_groups if group["params"]] == [0.5, 0.02]


def test_half_precision_and_wrappers_in_wrappers():
    settings = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, bf16=True)
    model = DataParallel(Float16Module(settings, WithModule()))
    assert set(plain_names(model).values()) == {n for n, _ in WithModule().named_parameters()}


def test_names_of_other_files_match_only_without_doubt():
    wrapped_name = "module._orig_mod.a.weight"
    assert match_names(["a.weight"], [wrapped_name]) == {"a.weight": wrapped_name}
    # each of the two may be meant
    assert match_names(["a.weight"], ["module.a.weight", "module.module.a.weight"]) == {}
    assert match_names(["weight", "module.weight"], ["_orig_mod.weight"]) == {}
    # what is there by its own name is not another's
    own = "module.weight"
    assert match_names(["weight", own], [own]) == {own: own}


def test_names_with_wrappers_of_older_releases_load():
    _, optimizer = wrapped("plain")
    step(optimizer, 0)
    saved = optimizer.state_dict()
    saved["param_names"] = {
        number: "module." + name.replace("layers.0.", "layers.0._orig_mod.")
        for number, name in saved["param_names"].items()
    }
    _, following = wrapped("plain")
    following.load_state_dict(saved)
    for mine, its in zip(following.names, optimizer.names, strict=True):
        for key, value in optimizer.state[its].items():
            assert torch.equal(following.state[mine][key], value)


def test_torchs_muon_with_names_of_a_wrapped_model_loads():
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    params = [*DataParallel(model).named_parameters()]
    theirs = torch.optim.Muon(reversed(params), lr=0.1)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    theirs.step()
    optimizer = build_optimizer(model, config())
    optimizer.load_state_dict(theirs.state_dict())
    for param in model.parameters():
        states = (its.state[param]["momentum_buffer"] for its in (optimizer, theirs))
        assert torch.equal(*states)


def test_errors_call_a_parameter_as_the_model_does():
    model = DataParallel(torch.compile(nn.Sequential(nn.Linear(4, 4, device="meta"))))
    with pytest.raises(ConfigurationError, match=r"^0\.weight"):
        build_optimizer(model, config())
