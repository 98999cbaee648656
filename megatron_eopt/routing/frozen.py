"""Parameters that were frozen when an optimizer was built, which it therefore never updates."""

import logging
from collections.abc import Iterable
from typing import Any
from weakref import ref

from torch import nn

from megatron_eopt.base.upstream import found

logger = logging.getLogger(__name__)


class Frozen:
    """Notices parameters that are unfrozen after the optimizer was built.

    Args:
        model_chunks: The model, which is not kept alive.
        replaced: Whether Megatron-FSDP exchanges the parameters of modules, so that only the
            present ones tell whether they are frozen.
    """

    def __init__(self, model_chunks: Iterable[Any], *, replaced: bool = False) -> None:
        managing = found("MegatronFSDP") or ()
        chunks = [chunk for chunk in model_chunks if isinstance(chunk, nn.Module)]
        self._replaced = replaced or any(
            isinstance(m, managing) for c in chunks for m in c.modules()
        )
        self._params = [
            (f"{path}.{leaf}".lstrip("."), ref(module), leaf, ref(param))
            for chunk in chunks
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
        mine, home = param(), module()
        if mine is not None and mine.requires_grad:
            return True
        if self._replaced or home is None:
            return False
        # FSDP2 registers other parameters while it has gathered them
        now = home._parameters.get(leaf)
        return now is not None and now.requires_grad
