"""Megatron-Bridge with our optimizers: one configuration class, nothing else to set.

Megatron-Bridge (0.4 and later) asks an optimizer configuration that has a method ``provide`` for
the optimizer, and calls ``finalize`` when all fields have their last values. Neither needs
Megatron-Bridge to be installed.
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

    Recipes, precision settings, communication overlap and the command line write to its fields
    after it was made, so nothing is checked before :meth:`finalize`. It can be written to
    ``run_config.yaml`` and read back, once this module has been imported.
    """

    def __post_init__(self) -> None:
        """Check nothing yet: fields may still change."""

    def finalize(self) -> None:
        """Check the fields and compute those that follow from others; may be called repeatedly.

        Layer-wise storage that was asked for by another flag than ``use_distributed_optimizer``
        turns that on too, which is what Megatron-Bridge reads when it wraps the model and names
        the checkpoint's format.

        Raises:
            ConfigurationError: If a value, or a combination, cannot be honoured.
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
        """Return the optimizer of a wrapped model; Megatron-Bridge calls this.

        The arguments, the result and the errors are those of
        :func:`megatron_eopt.get_megatron_optimizer`, but that one chunk needs no list.
        """
        self.finalize()
        return get_megatron_optimizer(
            self,
            model_chunks if isinstance(model_chunks, list) else [model_chunks],
            config_overrides,
            use_gloo_process_groups,
            pg_collection,
        )


# the trainers' configuration files may name the class above, where they check names
with contextlib.suppress(ImportError):
    from megatron.training.config.instantiate_utils import target_allowlist

    target_allowlist.add_exact(f"{__name__}.{BridgeOptimizerConfig.__qualname__}")
