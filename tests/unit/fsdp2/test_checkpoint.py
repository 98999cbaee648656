"""Saved by torch's distributed checkpoint at four ranks, loaded at two and at one."""

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.fsdp2 import build_optimizer, import_torch_muon
from tests.harness import run_ranks
from tests.unit.fsdp2.model import (
    MATRICES,
    config,
    eager,
    far,
    make_model,
    set_gradients,
    shard,
    state,
    train,
    weights,
    whole,
)

VARIANTS = {
    "muon": config(),
    "normuon": config("adaptive_muon", adaptive_muon_moment2_method="normuon"),
    "adamuon": config("adaptive_muon", adaptive_muon_moment2_method="adamuon"),
    "soap": config("soap"),
    "int8": config(muon_momentum_dtype="int8"),
    "fp8": config("adaptive_muon", muon_momentum_dtype="fp8"),
}


def whole_state(model, optimizer):
    """Return everything that a checkpoint has, as whole tensors."""
    saved = get_optimizer_state_dict(model, optimizer)
    return {
        f"{name}.{key}": whole(value) if isinstance(value, torch.Tensor) else value
        for name, entries in saved["state"].items()
        for key, value in entries.items()
    }


@eager
def save(folder):
    wholes = {}
    for name, settings in VARIANTS.items():
        model, optimizer = train("fsdp", settings, steps=3)
        optimizer.param_groups[0]["lr"] = 0.03
        checkpoint.save(
            {"optimizer": get_optimizer_state_dict(model, optimizer)},
            checkpoint_id=f"{folder}/{name}",
        )
        wholes[name] = whole_state(model, optimizer), weights(model)
        set_gradients(model, 3)
        optimizer.step()
        wholes[name] += (weights(model),)
    return wholes


@eager
def load(folder, layout, trained):
    """Return the state as loaded, and the weights after one more step."""
    results = {}
    for name, settings in VARIANTS.items():
        model = make_model(layout)
        with torch.no_grad():
            for key, param in model.named_parameters():
                param.copy_(shard(trained[name][key], param))
        optimizer = build_optimizer(model, settings)
        loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        checkpoint.load(loaded, checkpoint_id=f"{folder}/{name}", no_dist=layout == "plain")
        set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
        assert optimizer.param_groups[0]["lr"] == 0.03
        found = whole_state(model, optimizer)
        set_gradients(model, 3)
        optimizer.step()
        results[name] = found, weights(model)
    return results


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return folder, run_ranks(4, save, folder, cpu=False, timeout=120)


@pytest.mark.parametrize("world", [1, 2])
def test_state_loads_bit_equal_at_other_sizes(saved, world):
    folder, by_rank = saved
    trained = {name: result[1] for name, result in by_rank[0].items()}
    if world == 1:
        loaded = [load(folder, "plain", trained)]
    else:
        loaded = run_ranks(world, load, folder, "fsdp", trained, cpu=False, timeout=120)
    for results in loaded:
        for name, (found, after) in results.items():
            expected, _, then = by_rank[0][name]
            assert found.keys() == expected.keys()
            assert len(found) >= 20
            for key, value in expected.items():
                assert torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)), (name, key)
            assert far(after, then)[0] < 2e-6, name


@eager
def load_into_another_dtype(folder, written, settings):
    """Return what was loaded of a variant's checkpoint into another configuration, and stepped."""
    model = make_model("fsdp")
    optimizer = build_optimizer(model, settings)
    loaded = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    # one of float32 counts no steps
    planner = checkpoint.DefaultLoadPlanner(allow_partial_load=True)
    checkpoint.load(loaded, checkpoint_id=f"{folder}/{written}", planner=planner)
    set_optimizer_state_dict(model, optimizer, loaded["optimizer"])
    found = whole_state(model, optimizer)
    set_gradients(model, 3)
    optimizer.step()
    return found, optimizer.state[model.up.weight]["momentum_buffer"].dtype


def test_momentum_loads_into_another_dtype(saved):
    folder, by_rank = saved
    for written, dtype, settings in (
        ("int8", torch.float32, VARIANTS["muon"]),
        ("muon", torch.int8, VARIANTS["int8"]),
    ):
        arguments = (folder, written, settings)
        found, kept_in = run_ranks(2, load_into_another_dtype, *arguments, cpu=False)[0]
        assert kept_in == dtype
        expected = by_rank[0][written][0]
        momenta = [key for key in expected if key.endswith("momentum_buffer")]
        assert len(momenta) >= 5
        for key in momenta:
            # int8 has at least 64 numbers up to the largest of a block
            apart = (found[key] - expected[key]).abs().max() / expected[key].abs().max()
            assert apart <= (1 / 127 if dtype == torch.int8 else 0), key


def test_all_ranks_save_the_same(saved):
    for name in VARIANTS:
        first = saved[1][0][name][0]
        for other in saved[1][1:]:
            assert all(
                torch.equal(torch.as_tensor(value), torch.as_tensor(other[name][0][key]))
                for key, value in first.items()
            )


def test_soap_saves_statistics_of_every_logical_matrix(saved):
    keys = saved[1][0]["soap"][0].keys()
    assert {"up.weight.gate/L", "up.weight.up/Q_R", "down.weight.exp_avg_sq"} <= keys


def torch_muon(names):
    """Return a torch.optim.Muon after three steps, with its model."""
    model = make_model()
    params = [dict(model.named_parameters())[name] for name in names]
    muon = torch.optim.Muon(params, lr=0.02)
    for step in range(3):
        set_gradients(model, step)
        muon.step()
    return muon


NO_STACKS = tuple(name for name in MATRICES if name != "experts.weight")


def imported(state_dict, params):
    model = make_model("fsdp")
    model.experts.weight.requires_grad_(False)
    optimizer = build_optimizer(model, config())
    import_torch_muon(optimizer, state_dict, params)
    return state(model, optimizer)


def test_momenta_of_torchs_muon_are_imported():
    state_dict = torch_muon(NO_STACKS).state_dict()
    for momenta in run_ranks(4, imported, state_dict, NO_STACKS, cpu=False):
        for number, name in enumerate(NO_STACKS):
            expected = state_dict["state"][number]["momentum_buffer"]
            assert torch.equal(momenta[f"{name}.momentum_buffer"], expected)


def test_named_momenta_are_imported_by_name():
    state_dict = torch_muon(NO_STACKS).state_dict()
    group = {**state_dict["param_groups"][0], "params": list(NO_STACKS)}
    state_dict = {
        "state": {name: state_dict["state"][i] for i, name in enumerate(NO_STACKS)},
        "param_groups": [group],
    }
    model = make_model()
    model.experts.weight.requires_grad_(False)
    optimizer = build_optimizer(model, config())
    import_torch_muon(optimizer, state_dict)
    expected = state_dict["state"]["tiny.weight"]["momentum_buffer"]
    assert torch.equal(optimizer.state[model.tiny.weight]["momentum_buffer"], expected)


def test_settings_that_torchs_muon_had_otherwise_are_warned_of(caplog):
    like_torch = {"muon_nesterov": True, "muon_coefficient_type": "simple"}
    for settings, warned in ((like_torch, []), ({}, ["nesterov", "ns_coefficients"])):
        caplog.clear()
        model = make_model()
        model.experts.weight.requires_grad_(False)
        optimizer = build_optimizer(model, config(**settings))
        import_torch_muon(optimizer, torch_muon(NO_STACKS).state_dict(), NO_STACKS)
        of_torch = [r.args for r in caplog.records if r.msg.startswith("torch.optim.Muon had")]
        assert [name for name, *_ in of_torch] == warned


def test_import_refuses_what_does_not_fit():
    state_dict = torch_muon(NO_STACKS).state_dict()
    optimizer = build_optimizer(make_model(), config())
    with pytest.raises(ConfigurationError, match=r"params=None: must name the 4 parameters"):
        import_torch_muon(optimizer, state_dict)
    with pytest.raises(ConfigurationError, match=r"experts.weight.*have no momentum"):
        import_torch_muon(optimizer, state_dict, NO_STACKS)
    with pytest.raises(ConfigurationError, match=r"'nothing'.*are no parameters"):
        import_torch_muon(optimizer, state_dict, ("nothing", *NO_STACKS[1:]))


def test_a_state_dict_with_gaps_is_refused():
    _, optimizer = train("plain", config(), steps=1)
    saved = optimizer.state_dict()
    saved["state"] = {k: v for k, v in saved["state"].items() if "momentum_buffer" not in v}
    with pytest.raises(ConfigurationError, match=r"lacks momentum_buffer of up.weight"):
        build_optimizer(make_model(), config()).load_state_dict(saved)


def full(folder):
    """Save with whole tensors and load with them, as for an export."""
    model, optimizer = train("fsdp", VARIANTS["muon"], steps=2)
    options = StateDictOptions(full_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizer, options=options)
    other = make_model("fsdp")
    second = build_optimizer(other, VARIANTS["muon"])
    set_optimizer_state_dict(other, second, saved, options=options)
    return state(model, optimizer), state(other, second)


def test_whole_state_dicts_are_loaded_too():
    for ours, theirs in run_ranks(2, full, "", cpu=False):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
