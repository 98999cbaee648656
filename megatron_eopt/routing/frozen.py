"""Parameters that were frozen when an optimizer was built, which it therefore never updates."""

import logging
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn

logger = logging.getLogger(__name__)


class Frozen:
    """Notices parameters that are unfrozen after the optimizer was built.

    ``model_chunks`` are not kept alive.
    """

    def __init__(self, model_chunks: Iterable[Any]) -> None:
        self._params = [
            (f"{path}.{leaf}".lstrip("."), ref(module), leaf, ref(param))
            for chunk in model_chunks
            if isinstance(chunk, nn.Module)
            for path, module in chunk.named_modules()
            for leaf, param in module._parameters.items()
            if param is not None and not param.requires_grad
        ]

    def warn(self) -> None:
        """Log one warning that names the parameters that have been unfrozen since the last call."""
        names = [item[0] for item in self._params if self._is_trainable(*item[1:])]
        if names:
            self._params = [item for item in self._params if item[0] not in names]
            logger.warning(
                "%s: frozen when the optimizer was built, so it does not update them although they "
                "are trainable now. Build the optimizer again to train them.",
                ", ".join(names),
            )

    def _is_trainable(self, module: "ref[nn.Module]", leaf: str, param: "ref[Any]") -> bool:
        home = module()
        # FSDP exchanges parameters, so the present one and the one that it stands for count too
        now = None if home is None else home._parameters.get(leaf)
        known = (param(), now, getattr(now, "orig_param", None))
        return any(item is not None and item.requires_grad for item in known)
