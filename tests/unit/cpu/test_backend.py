"""enable() maps what it promises, and disable() leaves nothing behind."""

import subprocess
import sys
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
    cpu.enable()
    assert _snapshot() == once
    cpu.disable()
    assert _snapshot() == before
    cpu.disable()
    assert _snapshot() == before


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


def test_type_names_the_gpu_type() -> None:
    cpu.enable()
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype == torch.float16


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


def test_threads_started_while_it_is_on_follow_the_switch() -> None:
    def look() -> None:
        seen.append(torch.zeros(1, device="cuda").device.type)
        go_on.wait(10)
        seen.append(torch.zeros(1).type())

    class Looker(threading.Thread):
        run = staticmethod(look)  # type: ignore[assignment]

    kinds: list[Any] = [lambda: threading.Thread(target=look), Looker]
    for kind in kinds:
        seen: list[str] = []
        go_on = threading.Event()
        cpu.enable()
        thread = kind()
        before = set(vars(thread))
        thread.start()
        while not seen:
            go_on.wait(0.01)
        cpu.disable()
        go_on.set()
        thread.join()
        assert seen == ["cpu", "torch.FloatTensor"]
        assert "run" not in set(vars(thread)) - before


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


@pytest.mark.long
def test_enabled_before_megatron_is_imported() -> None:
    """The workers of all other tests import megatron-core first."""
    lines = [
        "from megatron_eopt import cpu; cpu.enable()",
        "import megatron.core.parallel_state as state",
        "from megatron.core.tensor_parallel import ColumnParallelLinear as Linear",
        "from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed as seed",
        "from megatron.core.model_parallel_config import ModelParallelConfig as Config",
        "import torch",
        "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(),"
        " rank=0, world_size=1)",
        "state.initialize_model_parallel(); seed(1)",
        "layer = Linear(4, 4, config=Config(), init_method=torch.nn.init.normal_, bias=False)",
        "layer(torch.ones(1, 4))[0].sum().backward()",
        "assert layer.weight.grad.type() == 'torch.cuda.FloatTensor'",
        "cpu.disable()",
        "assert layer.weight.grad.type() == 'torch.FloatTensor'",
    ]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True, timeout=120
    )
