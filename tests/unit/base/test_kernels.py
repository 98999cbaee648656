"""Which kernels run: by their check, by the switch, and alike on all ranks."""

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.errors import OutOfResources

from megatron_eopt import ConfigurationError
from megatron_eopt.base import gpu, kernels, peers
from megatron_eopt.base.agreement import answered_by
from megatron_eopt.layouts import redistribution
from megatron_eopt.layouts.redistribution import run_copies
from megatron_eopt.math import passes, products
from megatron_eopt.math.orthogonalize import orthogonalize
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks
from tests.harness.kernels import checked_kernels as checked_by_all
from tests.harness.log import listening
from tests.unit.math.test_kernel_checks import PRODUCTS, TABLES, changed_text
from tests.unit.storage.full_state import Case, build, steps
from tests.unit.storage.runs import SHARDED, weights

FAMILIES = {f"megatron_eopt.{module}": family for module, (family, _) in TABLES.items()}
checked_kernels = partial(checked_by_all, cases=slice(1))
"""What checks find is the matter of ``math/test_kernel_checks.py``."""

NO_RESOURCES = OutOfResources(300_000, 232_448, "shared memory")
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def orthogonal() -> torch.Tensor:
    return orthogonalize(X, precision="medium")


@pytest.fixture(autouse=True)
def _only_warnings(caplog):
    # a table that another test has asked for turns INFO on for the process
    caplog.set_level(logging.WARNING, "megatron_eopt")


@pytest.mark.parametrize("module", FAMILIES)
def test_a_launch_that_raises_leaves_its_family_to_torch_after_one_warning(module, caplog):
    launchers = ("launch", "launch_sums", "launch_division")
    with checked_kernels(), mock.patch.object(peers, "tell") as told:
        launched = sys.modules[module]
        for name in launchers:
            if hasattr(launched, name):
                setattr(launched, name, mock.Mock(side_effect=NO_RESOURCES))
        for _ in range(3):
            runs = {name: family.runs(X) for name, family in FAMILIES.items()}
        found = orthogonal()
    assert runs == {name: name != module for name in FAMILIES}
    (warning,) = caplog.messages
    # ranks agree on it
    assert not told.called
    assert FAMILIES[module].name in warning
    assert "out of resource: shared memory" in warning
    assert f"{kernels.SWITCH}=0" in warning
    # 16 bits, by kernels or not
    assert (found - orthogonal()).norm() < 2e-2 * found.norm()


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    order = []
    guard = mock.MagicMock()
    guard.__enter__.side_effect = lambda: order.append("guard")
    guard.__exit__.side_effect = lambda *_: order.append("left")
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: guard)
    some = SimpleNamespace(launch=lambda *args: order.append(args))
    monkeypatch.setitem(sys.modules, "some_kernels", some)
    products.KERNELS.call(torch.ones(1), "some_kernels", "launch", 1, 2)
    assert order == ["guard", (1, 2), "left"]


def hangs(*_: Any) -> None:
    """Stand in for a launch, longer than any limit here."""
    time.sleep(5)
    raise RuntimeError("too late")


OUT_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB"),
    # of other libraries
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)
BROKEN = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


def fails_first(*errors: Exception) -> Callable[..., None]:
    """Let a kernel for products raise errors, one at each launch, before it works."""
    module: Any = sys.modules["megatron_eopt.math.triton_products"]
    left, launch = [*errors], module.launch

    def launched(*args: Any) -> None:
        if left:
            raise left.pop(0)
        launch(*args)

    module.launch = launched
    return launched


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:20])
def test_a_lack_of_memory_gives_no_kernels_up(error, caplog):
    with checked_kernels(), mock.patch.object(torch.cuda, "empty_cache") as emptied:
        fails_first(error, error)
        with pytest.raises(type(error)) as failed:
            products.KERNELS.runs(X)
        assert failed.value is error
        assert emptied.call_count == 1
        # the check is done once there is memory, here as the cache is freed
        fails_first(error)
        assert products.KERNELS.runs(X)
        assert emptied.call_count == 2
        fails_first(error)
        with pytest.raises(type(error)) as failed:
            orthogonal()
        assert failed.value is error
    assert caplog.text == ""


@pytest.mark.parametrize("way", ["at once", "at torch's next function"])
def test_a_kernel_that_breaks_the_gpu_is_named_and_nothing_goes_on(way, caplog):
    def is_broken(_: torch.device) -> bool:
        return way != "at once"

    triton_s = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with checked_kernels(), mock.patch.object(gpu, "is_broken", is_broken):
        fails_first(BROKEN if way == "at once" else triton_s)
        with pytest.raises(kernels.KernelError, match=r"illegal memory access") as failed:
            products.KERNELS.runs(X)
    for text in (products.KERNELS.name, "X X^T (", "MEGATRON_EOPT_KERNELS=0"):
        assert text in str(failed.value)
    assert caplog.text == ""


@pytest.mark.parametrize("error", [BROKEN, OUT_OF_MEMORY[0], None], ids=["broken", "memory", "no"])
def test_a_broken_gpu_is_one_on_which_torch_s_functions_fail(monkeypatch, error):
    monkeypatch.setattr(torch, "zeros", mock.Mock(side_effect=error or [torch.tensor(0)]))
    assert gpu.is_broken(X.device) == (error is BROKEN)


def test_a_check_that_hangs_fails_in_time_by_name(monkeypatch, caplog):
    monkeypatch.setattr(kernels, "LIMIT", 0.5)
    caplog.set_level(logging.INFO, "megatron_eopt")
    with checked_kernels():
        sys.modules["megatron_eopt.math.triton_products"].launch = hangs  # type: ignore[attr-defined]
        with pytest.raises(kernels.KernelError, match=r"symmetric products hangs") as failed:
            products.KERNELS.runs(X)
    for text in ("X X^T (", "MEGATRON_EOPT_KERNELS=0"):
        assert text in str(failed.value)
    # said before
    (line,) = caplog.messages
    assert "checking the GPU kernels for symmetric products" in line


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("breaks", "KernelError: a GPU kernel for symmetric products broke the GPU's context"),
        ("hangs", "KernelError: a GPU kernel for symmetric products hangs"),
        ("lacks memory", "OutOfMemoryError: CUDA out of memory"),
    ],
)
@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_all_ranks_stop_without_a_collective_if_one_rank_s_check_fails(failing, how, text):
    differs = kernels.Family._differs

    def products_alone(family: kernels.Family, *args: Any) -> bool:
        return family is products.KERNELS and differs(family, *args)

    is_failing = torch.distributed.get_rank() == failing
    limit = 1.0 if is_failing and how == "hangs" else 60.0
    with (
        checked_kernels(),
        mock.patch.object(gpu, "is_there", return_value=True),
        mock.patch.object(kernels, "LIMIT", limit),
        mock.patch.object(kernels, "gather_objects", side_effect=AssertionError),
        mock.patch.object(kernels.Family, "_differs", products_alone),
        listening() as lines,
    ):
        if is_failing:
            error = BROKEN if how == "breaks" else OUT_OF_MEMORY[0]
            fails_first(error, error)
        if is_failing and how == "hangs":
            sys.modules["megatron_eopt.math.triton_products"].launch = hangs  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError) as failed:
            kernels.agree(wanted=True)
    end = f"{type(failed.value).__name__}: {failed.value}"
    assert end.startswith(text if is_failing else f"RuntimeError: rank {failing} failed: {text}")
    assert not [line for line in lines if "do not work" in line]


@on_ranks(3)
def test_a_rank_that_does_not_end_its_check_is_named():
    rank = torch.distributed.get_rank()
    if rank == 1:
        time.sleep(1)
    else:
        with pytest.raises(RuntimeError) as failed:
            peers.succeed_together(lambda: None, 0.5)
        assert rank == 0 or "ranks [1] have not finished" in str(failed.value)


@on_ranks(2)
def test_ranks_that_do_not_exist_are_not_waited_for():
    # the other rank does not come
    if torch.distributed.get_rank() == 0:
        with answered_by(mock.Mock()):
            assert peers.succeed_together(lambda: 3, 0.1) == 3


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_ranks_say_whose_kernel_has_failed_in_a_step(failing):
    is_failing = torch.distributed.get_rank() == failing
    with (
        checked_kernels(),
        mock.patch.object(gpu, "is_there", return_value=True),
        mock.patch.object(peers, "_PAUSE", 0.1),
        mock.patch.object(kernels.Family, "_differs", return_value=False),
        listening() as lines,
    ):
        kernels.agree(wanted=True)
        lines.clear()
        if is_failing:
            fails_first(NO_RESOURCES)
            with pytest.raises(kernels.KernelError, match=r"symmetric products") as failed:
                orthogonal()
            assert isinstance(failed.value.__cause__, OutOfResources)
            time.sleep(0.5)
        deadline = time.monotonic() + 20
        while not is_failing and not lines:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        told = [*lines]
        kernels.agree(wanted=True)
        lines.clear()
        time.sleep(0.5)
    assert lines == []  # after another build
    assert len(told) == (not is_failing)
    for line in told:
        start = f"rank {failing} failed: KernelError: a GPU kernel for symmetric prod"
        assert line.startswith(start)
        for text in ("shared memory", "MEGATRON_EOPT_KERNELS=0", "optimizer_kernels=False"):
            assert text in line


@pytest.mark.parametrize("way", ["environment", "field"])
def test_one_switch_turns_all_kernels_off_and_checks_none(monkeypatch, way):
    by_torch = orthogonal()
    with checked_kernels():
        if way == "environment":
            monkeypatch.setenv(kernels.SWITCH, "0")
        kernels.agree(wanted=way == "environment")
        with mock.patch.object(kernels.Family, "fault", side_effect=AssertionError):
            assert not any(family.runs(X) for family in kernels.FAMILIES.values())
            assert torch.equal(orthogonal(), by_torch)
        # the optimizer that is built next may use them again
        monkeypatch.delenv(kernels.SWITCH, raising=False)
        kernels.agree(wanted=True)
        assert all(family.runs(X) for family in FAMILIES.values())


def test_the_switch_takes_words_and_no_others(monkeypatch):
    for text, is_on in (("off", False), ("False", False), ("", True), ("1", True)):
        monkeypatch.setenv(kernels.SWITCH, text)
        assert kernels.is_on() == is_on
    # refused when an optimizer is built
    monkeypatch.setenv(kernels.SWITCH, "torch")
    with pytest.raises(ConfigurationError, match=f"{kernels.SWITCH}='torch'"):
        kernels.agree(wanted=True)


def test_a_check_that_is_interrupted_is_done_again():
    ends = [KeyboardInterrupt, "a fault"]
    with checked_kernels(), mock.patch.object(kernels.Family, "_first_fault", side_effect=ends):
        with pytest.raises(KeyboardInterrupt):
            passes.KERNELS.runs(X)
        assert not passes.KERNELS.runs(X)


def test_what_another_rank_cannot_use_counts_for_one_build(monkeypatch):
    with checked_kernels():
        for is_excluded in (True, False):
            passes.KERNELS.exclude(X.device, is_excluded)
            assert passes.KERNELS.runs(X) != is_excluded


def test_a_gpu_without_matrix_units_multiplies_by_torch_and_nobody_is_warned(monkeypatch, caplog):
    with checked_kernels():
        for capability, served in (((7, 5), False), ((8, 0), True), ((9, 0), True)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
            products.KERNELS.forget()
            assert products.serves(X.half()) == served
            assert passes.KERNELS.runs(X)
    assert caplog.text == ""


MODEL = {"layers": 1, "hidden": 32, "heads": 2, "query_groups": 2}
CASE = Case("muon", MODEL, ddp=SHARDED, config=SHARDED | {"matrix_buffer_mb": 1 / 128})


def trained(changed_on: int | None, changed: dict[str, Path]) -> tuple[Any, ...]:
    """Return which families run, what is logged, and weights after two steps, of which one rank's
    kernels have a fault."""
    rank = torch.distributed.get_rank()
    there = mock.patch.object(gpu, "is_there", return_value=True)
    with checked_kernels(changed if rank == changed_on else None):
        with there, listening() as lines:
            chunk, optimizer = build(CASE)
        # steps have no streams on a CPU
        steps(CASE, chunk, optimizer, 0, 2)
        runs = {name: family.runs(X) for name, family in FAMILIES.items()}
    found = {name: value.clone() for name, (_, value) in weights(CASE.run, chunk).items()}
    told = [line for line in lines if "GPU kernels" in line and "checking" not in line]
    return runs, told, found


@pytest.mark.parametrize("changed_on", [None, 0, 1])
def test_a_kernel_that_fails_on_one_rank_is_used_by_none(changed_on, tmp_path):
    changed = changed_text("math.triton_products", PRODUCTS["alpha left out"], tmp_path)
    ranks = run_ranks(2, trained, changed_on, changed)
    # one warning for all ranks, which names the kernel, the rank and the switch
    lines = [line for _, lines, _ in ranks for line in lines]
    assert len(lines) == (changed_on is not None)
    for line in lines:
        assert products.KERNELS.name in line
        assert f"rank {changed_on}: X X^T" in line
        assert kernels.SWITCH in line
    for runs, _, _ in ranks:
        failed = {name for name, is_run in runs.items() if not is_run}
        assert failed == (set() if changed_on is None else {"megatron_eopt.math.triton_products"})
    (_, _, first), (_, _, second) = ranks
    for name, weight in first.items():
        assert torch.isfinite(weight).all()
        assert torch.equal(weight, second[name])


def test_a_table_that_another_stream_uploaded_is_waited_for(monkeypatch):
    main, side = (mock.Mock(spec=["record_event", "wait_event"]) for _ in range(2))
    now = SimpleNamespace(stream=main)
    used: list[Any] = []
    tensor = SimpleNamespace(is_cuda=True, nbytes=8, device="cuda", record_stream=used.append)
    monkeypatch.setattr(gpu, "uploaded", lambda values, device: tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now.stream)
    table = gpu.Table(None, torch.device("cuda"))
    assert table.on_this_stream() is tensor
    assert (main.wait_event.mock_calls, used) == ([], [])
    now.stream = side
    assert table.on_this_stream() is tensor
    side.wait_event.assert_called_once_with(main.record_event.return_value)
    # its memory is not used anew before that, either
    assert used == [side]


def test_tables_are_used_where_they_are_launched():
    """Both are kept from step to step, and a step has several streams."""
    copies = [redistribution.Copy(0, 0, (64,), (1, 0), (1, 0))]
    for family, run in (
        (passes.KERNELS, lambda x: passes.update_([x], [None], [x.clone()], None, 0.1, 0.0)),
        (redistribution.KERNELS, lambda x: run_copies(copies, [x], [torch.empty_like(x)])),
    ):
        with checked_kernels():
            assert family.runs(X)
            with mock.patch.object(gpu.Table, "on_this_stream", autospec=True) as used:
                used.side_effect = RuntimeError("used")
                with pytest.raises(RuntimeError, match="used"):
                    run(torch.ones(64))
