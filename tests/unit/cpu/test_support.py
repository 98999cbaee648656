import argparse
from typing import Any

import pytest
from megatron.core.transformer.enums import AttnBackend

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.cpu import check_supported

SUPPORTED = {
    "distributed_backend": "gloo",
    "context_parallel_size": 1,
    "transformer_impl": "local",
    "sequence_parallel": True,
    "fp8": None,
    "cuda_graph_impl": "none",
    "attention_backend": AttnBackend.auto,
    "moe_token_dispatcher_type": "alltoall",
    "gradient_accumulation_fusion": False,
    "no_persist_layer_norm": True,
    "tensor_model_parallel_size": 2,
    "num_experts": 4,
    "position_embedding_type": "learned_absolute",
    "apply_rope_fusion": True,
}

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"distributed_backend": "nccl"}, "--distributed-backend='nccl'.*gloo"),
    ({"context_parallel_size": 2}, "--context-parallel-size=2: context parallelism"),
    ({"transformer_impl": "transformer_engine"}, "--transformer-impl.*local"),
    ({"fp8": "e4m3"}, "--fp8-format='e4m3'"),
    ({"cuda_graph_impl": "local"}, "--cuda-graph-impl='local': a CPU has no CUDA graphs"),
    ({"attention_backend": AttnBackend.flash}, "--attention-backend.*unfused"),
    ({"gradient_accumulation_fusion": True}, "--no-gradient-accumulation-fusion"),
    ({"no_persist_layer_norm": False}, "Pass --no-persist-layer-norm"),
    (
        {"num_experts": 4, "sequence_parallel": False},
        "--tensor-model-parallel-size=2: Megatron trains experts.*Pass --sequence-parallel",
    ),
    (
        {"num_experts": None, "multi_latent_attention": True},
        "--tensor-model-parallel-size=2: the gradient of multi-latent attention's rotary key",
    ),
    ({"position_embedding_type": "rope"}, "--no-rope-fusion"),
]


def test_supported_and_missing_fields_pass() -> None:
    check_supported(argparse.Namespace(**SUPPORTED))
    check_supported(argparse.Namespace())


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_supported(argparse.Namespace(**(SUPPORTED | change)))
