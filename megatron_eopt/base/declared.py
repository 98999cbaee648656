"""Keeps attributes of parameters when torch replaces these by DTensors.

``fully_shard`` and ``parallelize_module`` make new parameters without the attributes of the old
ones, such as ``eopt_split`` and ``use_muon``. Once this module is imported, they are copied, as
megatron-core does around its own calls of ``fully_shard``.
"""

import logging
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron_eopt.base.wrapping import around

logger = logging.getLogger(__name__)


def _carry(old: Any, new: Any) -> None:
    for name, value in vars(old).items() if new is not old else ():
        if not name.startswith("_"):  # torch's own are about one parameter
            vars(new).setdefault(name, value)


@around
def _on_sharding(original: Any, self: Any, param: Tensor, *args: Any, **kwargs: Any) -> None:
    original(self, param, *args, **kwargs)
    _carry(param, self.sharded_param)


@around
def _on_reset(original: Any, self: Any) -> None:
    """Carry attributes when a state dict's tensors take the parameters' places."""
    before = self.sharded_param
    original(self)
    _carry(before, self.sharded_param)


@around
def _on_conversion(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Carry attributes when parameters get new storage, as by ``model.to_empty``."""
    self.reshard()  # so that these are the sharded parameters
    before = {name: SimpleNamespace(**vars(p)) for name, p in self.named_parameters()}
    result = original(self, *args, **kwargs)
    for name, param in self.named_parameters():
        _carry(before[name], param)
    return result


def _on_registration(module: nn.Module, name: str, param: Any) -> None:
    before = module._parameters.get(name)
    # `parallelize_module` registers a DTensor under the old parameter's name
    is_new = isinstance(param, DTensor) and not isinstance(before, DTensor)
    if is_new and before is not None and before.shape == param.shape:
        _carry(before, param)


def _keep() -> None:
    register_module_parameter_registration_hook(_on_registration)
    # `fully_shard` replaces parameters without registering them, so its own methods are wrapped
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        FSDPModule._apply = _on_conversion(FSDPModule._apply)  # type: ignore[method-assign]
        FSDPParam._init_sharded_param = _on_sharding(FSDPParam._init_sharded_param)  # type: ignore[method-assign]
        FSDPParam.reset_sharded_param = _on_reset(FSDPParam.reset_sharded_param)  # type: ignore[method-assign]
    except (ImportError, AttributeError) as error:
        text = "fully_shard of this torch drops attributes of parameters (%s): set them afterwards"
        logger.warning(text, error)


_keep()
