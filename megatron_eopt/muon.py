"""The entry point of megatron-core's older releases."""

import warnings
from typing import Any

from megatron_eopt.base.errors import ConfigurationTypeError
from megatron_eopt.build.factory import get_megatron_optimizer
from megatron_eopt.settings.config import as_muon

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
    """Return Muon for matrices and Adam for the rest; deprecated.

    Use :func:`megatron_eopt.get_megatron_optimizer` with ``optimizer="muon"``.

    Args:
        config: An ``OptimizerConfig``; one whose optimizer is adam or sgd means Muon here.
        model_chunks: The wrapped model.
        config_overrides: As in ``get_megatron_optimizer``.
        use_gloo_process_groups: As there.
        pg_collection: As there.
        dump_param_to_param_group_map: As there.
        layer_wise_distributed_optimizer: Keep the state in fragments.

    Raises:
        ConfigurationError: As there.
        ConfigurationTypeError: As there, or if ``layer_wise_distributed_optimizer`` was given as
            the fifth argument, where older releases had it.
    """
    if isinstance(pg_collection, bool):
        raise ConfigurationTypeError(
            "pg_collection",
            pg_collection,
            "the fifth argument is the collection of process groups, as in get_megatron_optimizer",
            "Pass layer_wise_distributed_optimizer by its name",
        )
    warnings.warn(
        "get_megatron_muon_optimizer is deprecated; call get_megatron_optimizer with "
        "optimizer='muon'",
        DeprecationWarning,
        stacklevel=2,
    )
    return get_megatron_optimizer(
        as_muon(config, layer_wise=layer_wise_distributed_optimizer),
        model_chunks,
        config_overrides,
        use_gloo_process_groups,
        pg_collection=pg_collection,
        dump_param_to_param_group_map=dump_param_to_param_group_map,
    )
