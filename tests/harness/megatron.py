"""Megatron's parallel state inside a worker."""

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed


def initialize_megatron(
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    *,
    virtual_pp: int | None = None,
    gtp: int = 1,
    expert_gtp: int = 1,
    optimizer_instances: int = 1,
    seed: int = 123,
) -> None:
    """Build megatron-core's process groups and seed its random number trackers."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual_pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        gtp_remat_size=gtp,
        expert_gtp_remat_size=expert_gtp,
        num_distributed_optimizer_instances=optimizer_instances,
    )
    model_parallel_cuda_manual_seed(seed)
