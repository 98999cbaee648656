"""Each configuration mistake is an error when the optimizer is built, naming argument and value."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, ParamKey

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.base.names import IN_RANK_FILES
from megatron_eopt.config.checks import warn_of_unused
from megatron_eopt.wrappers.replicated import check_half


class Chunk(torch.nn.Module):
    """Looks like a wrapped model as far as checks go; all fail before it is used."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"num_attention_heads": 4, "num_query_groups": 4, "kv_channels": 8}
        self.config = SimpleNamespace(**sizes, attention_output_gate=False)
        self.linear = torch.nn.Linear(4, 4)
        flags = ("use_distributed_optimizer", "overlap_param_gather", "use_megatron_fsdp")
        self.ddp_config = SimpleNamespace(**dict.fromkeys(flags, False))


@pytest.mark.parametrize(
    ("optimizer", "fields"),
    [
        ("soap", {"muon_lr": 0.05}),
        ("adam", {"muon_min_lr": 0.01}),
        ("soap", {"soap_precondition_frequency": 7}),
        ("muon", {"muon_unknown": 1}),
        ("muon", {"muon_use_syrk": True}),
        ("soap", {"muon_use_syrk": True}),
        ("soap", {"muon_scalar_optimizer": "lion"}),
        ("adam", {"muon_momentum_dtype": "int8"}),
        ("scion", {"muon_skip_grad_clip": True}),
    ],
)
def test_settings_without_an_effect_are_named_in_one_warning(optimizer, fields, caplog):
    config = EmergingOptimizerConfig(optimizer=optimizer, lr=0.1)
    vars(config).update(fields)
    warn_of_unused(config, optimizer, {optimizer, "adam"})
    (record,) = caplog.records
    (field, value), *_ = fields.items()
    assert f"{field}={value!r}" in record.getMessage()


def test_settings_with_an_effect_are_not_named(caplog):
    config = EmergingOptimizerConfig(optimizer="soap", lr=0.1, muon_lr=0.05, muon_momentum=0.5)
    warn_of_unused(config, "soap", {"soap", "adam", "muon"})
    assert not caplog.records


OVERRIDES = [
    ({ParamKey(name="*"): {"betas": [0.9, 0.99]}}, "betas"),
    ({ParamKey(name="*"): {"max_lr": float("nan")}}, "max_lr"),
    ({ParamKey(name="*"): {"optimizer": "mon"}}, "mon"),
    ({ParamKey(name="*.bias"): {"optimizer": "muon"}}, "updates only matrices"),
    ({"linear.*": {"wd_mult": 0.0}}, "ParamKey"),
    (
        {ParamKey(name="*.weight"): {"wd_mult": 0.5}, ParamKey(name="linear.*"): {"wd_mult": 0.25}},
        "linear.weight",
    ),
]


@pytest.mark.parametrize(("overrides", "words"), OVERRIDES, ids=[w for _, w in OVERRIDES])
def test_bad_overrides(overrides, words):
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    with pytest.raises((ValueError, TypeError), match=words):
        get_megatron_optimizer(config, [Chunk()], overrides)


CHUNK = Chunk()
ARGUMENTS = [
    ({"model_chunks": []}, "model_chunks"),
    ({"model_chunks": CHUNK}, "model_chunks"),
    ({"config": {"optimizer": "muon"}}, "config"),
]


@pytest.mark.parametrize(("arguments", "name"), ARGUMENTS, ids=str)
def test_arguments_of_a_wrong_kind_are_named(arguments, name):
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    with pytest.raises((ConfigurationError, ConfigurationTypeError), match=name):
        get_megatron_optimizer(**{"config": config, "model_chunks": [CHUNK], **arguments})


@pytest.mark.parametrize("name", ["muon", "adam"])
def test_groups_that_do_not_exist_yet_are_named(name):
    with pytest.raises(
        ConfigurationError, match=r"^pg_collection=None: .*initialize_model_parallel"
    ):
        get_megatron_optimizer(EmergingOptimizerConfig(optimizer=name), [torch.nn.Linear(2, 2)])


@pytest.mark.parametrize(("dtype", "field"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_16_bit_parameters_need_their_flag(dtype, field):
    routing = SimpleNamespace(names={torch.zeros(1, dtype=dtype): "w"})
    with pytest.raises(ConfigurationError, match=rf"^{field}=False: .*Set {field}=True"):
        check_half(routing)


@pytest.mark.parametrize(
    ("optimizer", "fields", "words"),
    [
        ("muon", {}, r"^--ckpt-format='torch'"),
        ("adam", {"cautious_weight_decay": True}, "in modes that only megatron-core's own Adam"),
        ("adam", {"optimizer_cpu_offload": True}, r"^optimizer_cpu_offload=True: .*GPU"),
    ],
)
def test_ranks_write_files_of_their_own_for_megatron_cores_adam_alone(optimizer, fields, words):
    chunk = Chunk()
    chunk.linear.bias.requires_grad = False
    chunk.ddp_config.use_distributed_optimizer = True
    fields |= {"lr": 0.1, "use_distributed_optimizer": True}
    config = EmergingOptimizerConfig(optimizer=optimizer, **fields)
    vars(config)[IN_RANK_FILES] = True
    with pytest.raises(ConfigurationError, match=words):
        get_megatron_optimizer(config, [chunk])
