"""The function mode that reads ``cuda`` as ``cpu``, and its place on each thread's mode stack.

Torch keeps one stack of function modes per thread, hands a call to the topmost mode first, and
takes a mode off the stack while it handles a call. Hence three rules here:

* The mode stands at the bottom of the stack, because a mode that leaves takes the topmost one off,
  whichever that is. So modes entered earlier or later leave without taking this one along. Only
  the context of ``torch.set_default_device``, which insists on the bottom, goes below it.
* ``Tensor.backward`` and its like run Python code (recomputation, the MoE all-to-all) inside one
  call. The autograd engine therefore gets the mode back while it runs, and threads (data loaders,
  asynchronous saves) get it when they begin, see :func:`mode_patches`.
* A mode can only be taken off the stack of the running thread. Whether it acts is therefore an
  attribute, which all threads share.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device

from megatron_eopt.cpu.generators import MAY_DRAW_FOR_HOST, Generators
from megatron_eopt.cpu.patches import Patch

CPU = torch.device("cpu")

type Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def names_a_gpu(device: object) -> bool:
    """Whether torch would read ``device`` (a name, an index or a torch.device) as a GPU."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments with the GPU read as the CPU, and without page-locked memory."""
    return {
        name: CPU if name == "device" and names_a_gpu(value) else value
        for name, value in kwargs.items()
        if name != "pin_memory"
    }


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *rest = args
    if rest and names_a_gpu(rest[0]):
        rest[0] = CPU
    return tensor.to(*rest, **_on_cpu(kwargs))


def _type(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Megatron compares ``Tensor.type()`` with names like ``torch.cuda.HalfTensor``."""
    tensor, *rest = args
    if not rest and not kwargs:
        return tensor.type().replace("torch.", "torch.cuda.", 1)
    if rest and isinstance(rest[0], str):
        rest[0] = rest[0].replace("torch.cuda.", "torch.", 1)
    return tensor.type(*rest, **kwargs)


def _same_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


_HANDLERS: dict[Any, Handler] = {
    torch.Tensor.to: _to,
    torch.Tensor.type: _type,
    torch.Tensor.cuda: _same_tensor,
    torch.Tensor.pin_memory: _same_tensor,
}


def _default_is_a_gpu(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func`` makes a tensor on torch's default device, and that is a GPU."""
    default = default_device.CURRENT_DEVICE
    if default is None or not names_a_gpu(default):
        return False
    return func in default_device._device_constructors() and kwargs.get("device") is None


class CudaIsCpu(TorchFunctionMode):
    """Reads every mention of a GPU in a torch call as the CPU while ``on``.

    Calls that draw random numbers get the one of ``generators`` that is theirs.
    """

    def __init__(self, generators: Generators) -> None:
        super().__init__()
        self.on = False
        self._generators = generators

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with the CPU wherever its arguments name a GPU."""
        kwargs = kwargs or {}
        if not self.on:
            return func(*args, **kwargs)
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(args, kwargs)
        # every call of torch passes here, so that most must get by with few of Python's
        if _default_is_a_gpu(func, kwargs):
            # as torch.set_default_device, whose context is below this mode, would fill it in
            kwargs = {**kwargs, "device": default_device.CURRENT_DEVICE}
        if func in MAY_DRAW_FOR_HOST:
            kwargs = self._generators.arguments(func, args, kwargs)
        return func(*args, **_on_cpu(kwargs)) if kwargs else func(*args)


def stack_of_modes() -> list[Any]:
    """Return the function modes of the running thread, the bottom one first."""
    depth = _len_torch_function_stack()
    return [_get_function_stack_at(level) for level in range(depth)]


def _take_stack() -> list[Any]:
    """Empty this thread's mode stack; the bottom mode comes first in the list."""
    return [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())][::-1]


def put_on_stack(mode: CudaIsCpu) -> None:
    """Put ``mode`` on the running thread's stack, unless it is there."""
    stack = _take_stack()
    if mode not in stack:
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        has_default = default is not None and stack[:1] == [default]
        stack.insert(1 if has_default else 0, mode)
    for entry in stack:
        _push_on_torch_function_stack(entry)


def take_off_stack(mode: CudaIsCpu) -> None:
    """Take ``mode`` off the running thread's stack and leave the other modes as they are."""
    for entry in _take_stack():
        if entry is not mode:
            _push_on_torch_function_stack(entry)


def mode_patches(mode: CudaIsCpu) -> list[Patch]:
    """Return replacements that let torch's autograd engine and new threads run under ``mode``."""
    plain = torch.autograd.graph._engine_run_backward
    plain_bootstrap: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if mode in stack_of_modes():
            return plain(*args, **kwargs)
        _push_on_torch_function_stack(mode)
        try:
            return plain(*args, **kwargs)
        finally:
            _pop_torch_function_stack()

    def bootstrap(thread: threading.Thread) -> None:
        # a thread's mode stack is its own and goes away with it
        put_on_stack(mode)
        plain_bootstrap(thread)

    return [
        Patch(torch.autograd, plain.__name__, run_backward),
        Patch(torch.autograd.graph, plain.__name__, run_backward),
        Patch(threading.Thread, "_bootstrap_inner", bootstrap),
    ]
