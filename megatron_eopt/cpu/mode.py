"""A torch function mode that treats ``cuda`` as ``cpu``, and its place on the mode stacks.

Torch has a stack of function modes per thread. It passes a call to the topmost mode first and
removes a mode from the stack while that mode handles the call. Hence three rules:

* The mode is at the bottom of the stack, because a mode that exits pops the topmost one, whichever
  it is. Only the mode of ``torch.set_default_device``, which requires the bottom, is below it.
* ``Tensor.backward`` runs Python code (recomputation, the MoE all-to-all) inside one call, so the
  autograd engine gets the mode back while it runs. New threads (data loaders, asynchronous saves)
  get it when they start; see :func:`mode_patches`.
* A thread can only change its own stack, so the switch ``on`` is an attribute that threads share.
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
    # an index means a GPU; Python counts True as the number 1
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a GPU device in keyword arguments by the CPU, and drop ``pin_memory``."""
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


_ALWAYS_CHECKED = {*_HANDLERS, *MAY_DRAW_FOR_HOST, *default_device._device_constructors()}
"""Functions of which calls without keywords may change, too."""


def _default_is_a_gpu(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether ``func`` creates a tensor on torch's default device and that is a GPU."""
    default = default_device.CURRENT_DEVICE
    if default is None or not names_a_gpu(default):
        return False
    return func in default_device._device_constructors() and kwargs.get("device") is None


class CudaIsCpu(TorchFunctionMode):
    """Replaces GPU devices in torch calls by the CPU while ``on`` is true.

    Calls that draw random numbers get the host's or the GPU's generator from ``generators``.
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
        """Call ``func`` with the CPU in place of every GPU in its arguments."""
        # every torch call passes here, so the common path must be short
        if (not kwargs and func not in _ALWAYS_CHECKED) or not self.on:
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(args, kwargs)
        if _default_is_a_gpu(func, kwargs):
            # torch.set_default_device, whose mode is below this one, would set it only later
            kwargs = {**kwargs, "device": default_device.CURRENT_DEVICE}
        if func in MAY_DRAW_FOR_HOST:
            kwargs = self._generators.arguments(func, args, kwargs)
        return func(*args, **_on_cpu(kwargs)) if kwargs else func(*args)


def stack_of_modes() -> list[Any]:
    """Return the current thread's function modes, the bottom one first."""
    depth = _len_torch_function_stack()
    return [_get_function_stack_at(level) for level in range(depth)]


def _take_stack() -> list[Any]:
    """Remove and return the current thread's function modes, the bottom one first."""
    return [_pop_torch_function_stack() for _ in range(_len_torch_function_stack())][::-1]


def put_on_stack(mode: CudaIsCpu) -> None:
    """Put ``mode`` on the current thread's stack unless it is already on it."""
    stack = _take_stack()
    if mode not in stack:
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        has_default = default is not None and stack[:1] == [default]
        stack.insert(1 if has_default else 0, mode)
    for entry in stack:
        _push_on_torch_function_stack(entry)


def take_off_stack(mode: CudaIsCpu) -> None:
    """Remove ``mode`` from the current thread's stack and keep the other modes."""
    for entry in _take_stack():
        if entry is not mode:
            _push_on_torch_function_stack(entry)


def mode_patches(mode: CudaIsCpu) -> list[Patch]:
    """Return patches that make the autograd engine and new threads run under ``mode``."""
    plain = torch.autograd.graph._engine_run_backward
    plain_bootstrap: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        # a backward pass outside of another torch call still has the mode
        if mode in stack_of_modes():
            return plain(*args, **kwargs)
        _push_on_torch_function_stack(mode)
        try:
            return plain(*args, **kwargs)
        finally:
            _pop_torch_function_stack()

    def bootstrap(thread: threading.Thread) -> None:
        # no cleanup is needed, because the thread's mode stack ends with it
        put_on_stack(mode)
        plain_bootstrap(thread)

    return [
        Patch(torch.autograd, plain.__name__, run_backward),
        Patch(torch.autograd.graph, plain.__name__, run_backward),
        Patch(threading.Thread, "_bootstrap_inner", bootstrap),
    ]
