"""What cannot be honoured is refused when the optimizer is built, with a way out."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial

from megatron_eopt.base.errors import ConfigurationError, ConfigurationTypeError
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.harness.megatron import initialize_megatron
from tests.unit.fsdp2.model import config, make_model

FIELDS = [
    ({"fp16": True}, r"fp16=True: needs a loss scale"),
    ({"loss_scale": 128.0}, r"loss_scale=128.0: belongs to the training loop"),
    ({"muon_tp_mode": "blockwise"}, r"muon_tp_mode='blockwise': would orthogonalize"),
    ({"muon_exempt_from_clipping": True}, r"muon_exempt_from_clipping=True: is not supported"),
    ({"grad_norm_skip_threshold": 0.0}, r"skip_threshold=0.0: works with get_meg"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS)
def test_fields_without_a_meaning_here(fields, message):
    with pytest.raises(ConfigurationError, match=message):
        build_optimizer(make_model(), config(**fields))


def test_a_configuration_of_another_class():
    with pytest.raises(ConfigurationTypeError, match=r"must be an OptimizerConfig"):
        build_optimizer(make_model(), {"optimizer": "muon"})


def test_a_model_on_the_meta_device():
    with pytest.raises(ConfigurationError, match=r"has no storage yet. Call model.to_empty"):
        build_optimizer(make_model().to("meta"), config())


def test_a_model_without_trainable_parameters():
    with pytest.raises(ConfigurationError, match=r"no parameter that requires a gradient"):
        build_optimizer(make_model().requires_grad_(False), config())


def test_frozen_parameters_are_left_out():
    model = make_model()
    model.tiny.weight.requires_grad_(False)
    optimizer = build_optimizer(model, config())
    held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    assert id(model.tiny.weight) not in held
    assert id(model.up.weight) in held


def test_two_parameters_with_one_storage():
    model = make_model()
    model.lm_head.weight = torch.nn.Parameter(model.up.weight.data[:11])
    with pytest.raises(ConfigurationError, match=r"shares its storage with up.weight"):
        build_optimizer(model, config())


def test_double_precision():
    with pytest.raises(ConfigurationError, match=r"dtype=torch.float64: must be one of"):
        build_optimizer(make_model().double(), config())


def test_patterns_that_name_nothing():
    with pytest.raises(ConfigurationError, match=r"none of these patterns matches"):
        build_optimizer(make_model(), config(), output_layers=["classifier"])


def refused_since_ranks_differ() -> str:
    with pytest.raises(ConfigurationError) as error:
        build_optimizer(make_model("fsdp"), config(lr=0.1 * (1 + dist.get_rank())))
    return str(error.value)


def test_ranks_that_are_configured_differently():
    for message in run_ranks(2, refused_since_ranks_differ, cpu=False):
        assert "lr=" in message
        assert "is not the same on all ranks" in message


def refused(model):
    with pytest.raises(ConfigurationError) as error:
        build_optimizer(model, config())
    return str(error.value)


def refusals_of_meshes():
    plain = make_model("fsdp")
    plain.extra = torch.nn.Linear(4, 4)
    partial = make_model("fsdp")
    mesh = init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False)
    partial.up.weight = torch.nn.Parameter(weight)
    elsewhere = make_model("fsdp")
    rank = torch.distributed.get_rank()
    other = DeviceMesh("cpu", [1 - rank], _init_backend=False)
    weight = DTensor.from_local(torch.ones(4, 4), other, run_check=False)
    elsewhere.up.weight = torch.nn.Parameter(weight)
    return refused(plain), refused(partial), refused(elsewhere)


def test_parameters_beside_their_mesh():
    for plain, partial, elsewhere in run_ranks(2, refusals_of_meshes, cpu=False):
        assert plain.startswith("extra.weight=(4, 4): is a plain tensor beside DTensors")
        assert partial.startswith("up.weight=(Partial(sum),): must be Shard or Replicate")
        assert "is on a mesh without rank" in elsewhere


def refusal_of_megatrons_tensor_parallelism():
    initialize_megatron(tp=2)
    model = make_model("fsdp")
    model.up.weight.tensor_model_parallel = True
    model.up.weight.partition_dim = 0
    return refused(model)


def test_a_mesh_without_the_tensor_parallel_dimension():
    for message in run_ranks(2, refusal_of_megatrons_tensor_parallelism):
        assert "is cut over 2 tensor-parallel ranks along dimension 0" in message
        assert "has no dimension for them" in message
