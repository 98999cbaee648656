"""Use megatron-eopt in Megatron-Bridge: one configuration class, no other change.

Megatron-Bridge (0.4 or later) calls ``finalize`` on the optimizer configuration once all fields are
set, then ``provide`` to build the optimizer. This module does not import Megatron-Bridge.
"""

import contextlib
import logging
from dataclasses import dataclass
from typing import Any

from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_eopt.config.fields import changed_fields, field_defaults
from megatron_eopt.config.registry import Overrides
from megatron_eopt.config.settings import resolve
from megatron_eopt.config.values import read_config
from megatron_eopt.wrappers.config import EmergingOptimizerConfig, check_config
from megatron_eopt.wrappers.factory import get_megatron_optimizer

logger = logging.getLogger(__name__)

__all__ = ["BridgeOptimizerConfig"]


@dataclass
class BridgeOptimizerConfig(EmergingOptimizerConfig):
    """An :class:`EmergingOptimizerConfig` for ``ConfigContainer.optimizer`` of Megatron-Bridge.

    Megatron-Bridge changes fields after construction (recipe, precision, communication overlap,
    command line). So the constructor checks nothing; :meth:`finalize` does. Import this module
    before you read a saved ``run_config.yaml`` that contains this class.
    """

    @classmethod
    def from_recipe(cls, config: OptimizerConfig, **fields: Any) -> "BridgeOptimizerConfig":
        """Return a configuration that keeps what a recipe's configuration sets.

        Fields for which the recipe has another value than megatron-core's default are taken over;
        all others have the recommended defaults.

        Args:
            config: The recipe's configuration, ``cfg.optimizer``. It is not changed.
            **fields: Fields that take precedence over the recipe's.

        Raises:
            ConfigurationTypeError: If ``config`` is not an ``OptimizerConfig``.
        """
        check_config(config)
        config = read_config(config)
        ours, is_ours = field_defaults(cls()), isinstance(config, EmergingOptimizerConfig)
        usual = {} if is_ours else field_defaults(OptimizerConfig())
        changed = changed_fields(config, usual)
        # other fields belong to subclasses, which have defaults of their own
        theirs = field_defaults(config)
        lost = [n for n, v in changed.items() if n not in ours and n in theirs and v != theirs[n]]
        if lost:
            text = "%s has these settings, which BridgeOptimizerConfig does not have: %s"
            logger.warning(text, type(config).__name__, ", ".join(sorted(lost)))
        return cls(**{n: v for n, v in changed.items() if n in ours} | fields)

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
        # only now, since it checks values and fills in those that depend on others
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
