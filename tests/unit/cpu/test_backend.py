"""enable() maps what it promises, and disable() leaves nothing behind."""

import logging
import threading
import types
from collections.abc import Iterator
from typing import Any

import megatron.core.datasets.utils
import megatron.core.tensor_parallel.random
import pytest
import torch
import torch.utils.checkpoint
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_eopt import cpu
from megatron_eopt.cpu.mode import stack_of_modes

OWNERS = (
    torch,
    torch.Tensor,
    torch.cuda,
    torch.cuda.random,
    torch.cuda.memory,
    torch.random,
    torch.utils.checkpoint,
    torch.utils.checkpoint.DefaultDeviceType,
    torch.accelerator,
    torch.autograd,
    torch.autograd.graph,
    torch.distributed,
    torch.distributed.distributed_c10d,
    torch._dynamo.config,
    threading,
    threading.Thread,
    megatron.core.datasets.utils,
    megatron.core.tensor_parallel.random,
    WrappedTorchNorm,
)


def _snapshot() -> dict[str, Any]:
    """Every attribute by identity, and the rest of the state that enable() touches."""
    attributes = {
        f"{owner.__name__}.{name}": id(value)
        for owner in OWNERS
        for name, value in vars(owner).items()
        # loaded on first use by anyone
        if not isinstance(value, types.ModuleType)
    }
    return attributes | {
        "modes": [id(mode) for mode in stack_of_modes()],
        "stance": torch._dynamo.eval_frame._stance,
    }


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    assert not cpu.is_enabled()
    before = _snapshot()
    yield
    cpu.disable()
    assert _snapshot() == before


def test_enable_and_disable_are_idempotent() -> None:
    before = _snapshot()
    cpu.enable()
    once = _snapshot()
    for change, expected in ((cpu.enable, once), (cpu.disable, before), (cpu.disable, before)):
        change()
        assert _snapshot() == expected


@pytest.mark.parametrize(
    "device", ["cuda", "cuda:1", 0, torch.device("cuda"), torch.device("cuda", 1)]
)
def test_every_name_of_a_gpu_means_the_cpu(device: Any) -> None:
    cpu.enable()
    tensor = torch.ones(2)
    made = [
        torch.zeros(2, device=device),
        torch.empty(2, device=device, pin_memory=True),
        torch.tensor([1], device=device),
        torch.zeros_like(tensor, device=device),
        tensor.new_empty(2, device=device),
        tensor.to(device),
        tensor.to(device, torch.float64),
        tensor.to(device=device),
        tensor.cuda(device),
        torch.nn.Linear(2, 2).to(device).weight,
        torch.nn.Linear(2, 2, device=device).cuda().weight,
    ]
    assert {entry.device.type for entry in made} == {"cpu"}
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_backward_functions_see_the_gpu_too() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * torch.full((1,), 2.0, device="cuda")

    cpu.enable()
    x = torch.ones(1, requires_grad=True)
    Doubled.apply(x).backward()
    assert x.grad is not None
    assert x.grad.item() == 2
    torch.autograd.backward(Doubled.apply(x))
    assert torch.autograd.grad(Doubled.apply(x), x)[0].item() == 2
    assert len(stack_of_modes()) == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_variable_decides(monkeypatch, caplog, device):
    monkeypatch.setenv("MEGATRON_EOPT_DEVICE", device)
    with caplog.at_level(logging.INFO):
        assert cpu.choose_device() == cpu.enable_if_chosen() == device
    assert cpu.is_enabled() == (device == "cpu") == ("MEGATRON_EOPT_DEVICE" in caplog.text)


def test_without_the_variable_the_gpu_decides(monkeypatch):
    monkeypatch.delenv("MEGATRON_EOPT_DEVICE", raising=False)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    with cpu.enabled():
        assert torch.cuda.is_available()
        assert cpu.choose_device() == expected


def test_compiled_functions_run_eagerly() -> None:
    def on_gpu(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return x + torch.ones(1, device="cuda")

    calls: list[torch.Tensor] = []
    compiled = torch.compile(on_gpu)
    cpu.enable()
    for _ in range(3):
        assert compiled(torch.ones(1)).item() == 2
    # a compiled function would have been traced once
    assert len(calls) == 3
    assert type(calls[0]) is torch.Tensor


def test_streams_and_events_do_nothing() -> None:
    cpu.enable()
    new_stream: Any = torch.cuda.Stream
    stream = new_stream(device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    new_event: Any = torch.cuda.Event
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start, end = new_event(enable_timing=True), new_event(enable_timing=True)
        start.record()
        stream.record_event(end)
    end.synchronize()
    torch.cuda.synchronize()
    assert end.query()
    assert start.elapsed_time(end) >= 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == 0
    assert torch.cuda.get_device_properties(0).total_memory > 1 << 28
