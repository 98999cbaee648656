"""The entry point for Muon in older releases of megatron-core."""

import warnings
from typing import Any

from megatron_eopt.wrappers.config import as_muon
from megatron_eopt.wrappers.factory import get_megatron_optimizer

__all__ = ["get_megatron_muon_optimizer"]


def get_megatron_muon_optimizer(
    config: Any,
    model_chunks: list[Any],
    config_overrides: Any = None,
    use_gloo_process_groups: bool = True,
    pg_collection: Any = None,
    dump_param_to_param_group_map: str | None = None,
    *,
    layer_wise_distributed_optimizer: bool = False,
) -> Any:
    """Build Muon for matrices and Adam for all other parameters; deprecated.

    Use :func:`megatron_eopt.get_megatron_optimizer` with ``optimizer="muon"`` instead. Arguments
    and errors are the same, but this function uses Muon even if the configuration says adam or sgd.
    ``layer_wise_distributed_optimizer`` shards the state over data-parallel ranks.
    """
    hint = "call get_megatron_optimizer with optimizer='muon'"
    text = f"get_megatron_muon_optimizer is deprecated; {hint}"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    return get_megatron_optimizer(
        as_muon(config, layer_wise=layer_wise_distributed_optimizer),
        model_chunks,
        config_overrides,
        use_gloo_process_groups,
        pg_collection=pg_collection,
        dump_param_to_param_group_map=dump_param_to_param_group_map,
    )
