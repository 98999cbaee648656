"""Use megatron-eopt in Megatron-Bridge: one configuration class, no other change.

Megatron-Bridge (0.4 or later) calls ``finalize`` on the optimizer configuration once all fields are
set, then ``provide`` to build the optimizer. This module does not import Megatron-Bridge.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from megatron_eopt.build.factory import get_megatron_optimizer
from megatron_eopt.settings.config import EmergingOptimizerConfig
from megatron_eopt.settings.registry import Overrides
from megatron_eopt.settings.settings import resolve

__all__ = ["BridgeOptimizerConfig"]


@dataclass
class BridgeOptimizerConfig(EmergingOptimizerConfig):
    """An :class:`EmergingOptimizerConfig` for ``ConfigContainer.optimizer`` of Megatron-Bridge.

    Megatron-Bridge changes fields after construction (recipe, precision, communication overlap,
    command line). So the constructor checks nothing; :meth:`finalize` does. Import this module
    before you read a saved ``run_config.yaml`` that contains this class.
    """

    def __post_init__(self) -> None:
        """Skip the checks, because fields may still change."""

    def finalize(self) -> None:
        """Check all fields and set those that depend on others; you can call it repeatedly.

        Sets ``use_distributed_optimizer=True`` if another field selects layer-wise storage, because
        Megatron-Bridge reads that field to wrap the model and to choose the checkpoint format.

        Raises:
            ConfigurationError: If a value is invalid, or a combination is not supported.
            ConfigurationTypeError: If a value has the wrong type.
        """
        settings = resolve(self)
        super().__post_init__()
        if settings.storage == "sharded":
            self.use_distributed_optimizer = True

    def provide(
        self,
        *,
        model_chunks: Any,
        config_overrides: Overrides | None,
        use_gloo_process_groups: bool = False,
        pg_collection: Any = None,
    ) -> Any:
        """Build the optimizer of a wrapped model; Megatron-Bridge calls this.

        Arguments, result and errors are those of :func:`megatron_eopt.get_megatron_optimizer`.
        ``model_chunks`` may also be a single chunk without a list.
        """
        self.finalize()
        return get_megatron_optimizer(
            self,
            model_chunks if isinstance(model_chunks, list) else [model_chunks],
            config_overrides,
            use_gloo_process_groups,
            pg_collection,
        )


# Megatron's trainer only instantiates classes on this list from configuration files
with contextlib.suppress(ImportError):
    from megatron.training.config.instantiate_utils import target_allowlist

    target_allowlist.add_exact(f"{__name__}.{BridgeOptimizerConfig.__qualname__}")
