"""Parameters that were frozen when an optimizer was built, which it therefore never updates."""

import logging
from collections.abc import Iterable
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import nn

from megatron_eopt.routing.places import ModelWalk
from megatron_eopt.routing.plain_names import joined

logger = logging.getLogger(__name__)


class Frozen:
    """Notices parameters that are unfrozen after the optimizer was built.

    Several optimizers may share a model, each built while the others' parameters are frozen; what
    one of them updates is no news. The model is not kept alive.
    """

    _of_optimizers: ClassVar["WeakSet[Frozen]"] = WeakSet()

    def __init__(self, walks: Iterable[ModelWalk]) -> None:
        # by module and name, because FSDP replaces parameters by other objects
        self._updated: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
        # those that were frozen, with names and modules
        self.params: list[tuple[str, ref[nn.Module], str, ref[nn.Parameter]]] = []
        for walk in walks:
            frozen = []
            for path, module in walk.modules.items():
                named = [(leaf, p) for leaf, p in module._parameters.items() if p is not None]
                if trained := {leaf for leaf, param in named if param.requires_grad}:
                    self._updated[module] = trained
                frozen += [(path, module, *item) for item in named if item[0] not in trained]
            self.params += [
                (joined(walk.paths[path], leaf), ref(module), leaf, ref(param))
                for path, module, leaf, param in frozen
            ]
        Frozen._of_optimizers.add(self)

    def warn(self) -> None:
        """Log one warning that names the parameters that have been unfrozen since the last call."""
        names = [item[0] for item in self.params if self._is_trainable(*item[1:])]
        if names:
            self.params = [item for item in self.params if item[0] not in names]
            logger.warning(
                "%s: frozen when the optimizer was built, so it does not update them although they "
                "are trainable now. Build the optimizer again to train them.",
                ", ".join(names),
            )

    def _is_trainable(self, module: "ref[nn.Module]", leaf: str, param: "ref[Any]") -> bool:
        home = module()
        if home is None:
            return False
        # FSDP exchanges parameters, so the present one and the one that it stands for count too
        # a scripted module's table is no dictionary
        now = dict(home._parameters.items()).get(leaf)
        versions = (param(), now, getattr(now, "orig_param", None))
        # every step asks, and hardly ever goes on from here
        if not any(item is not None and item.requires_grad for item in versions):
            return False
        return not any(leaf in other._updated.get(home, ()) for other in Frozen._of_optimizers)
