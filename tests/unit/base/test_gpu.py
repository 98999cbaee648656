"""Where Triton's kernels run, and where they cannot."""

import logging
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_eopt.base import gpu

PROBE = "megatron_eopt.base.triton_probe"


def fail():
    raise RuntimeError("Failed to find C compiler")


@pytest.mark.parametrize("works", [False, True])
def test_without_a_compiler_torch_serves_after_one_warning(monkeypatch, caplog, works):
    probe = SimpleNamespace(launch=(lambda: None) if works else fail)
    monkeypatch.setitem(sys.modules, PROBE, probe)
    caplog.set_level(logging.WARNING, "megatron_eopt")
    gpu.compiles.cache_clear()
    try:
        tensor: object = SimpleNamespace(is_cuda=True)
        assert [gpu.runs_kernels(tensor) for _ in range(2)] == [works] * 2
    finally:
        gpu.compiles.cache_clear()
    assert len(caplog.messages) == (not works)
    assert works or "C compiler" in caplog.messages[0]


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    order = []
    guard = mock.MagicMock()
    guard.__enter__.side_effect = lambda: order.append("guard")
    guard.__exit__.side_effect = lambda *_: order.append("left")
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: guard)
    kernels = SimpleNamespace(launch=lambda *args: order.append(args))
    monkeypatch.setitem(sys.modules, "some_kernels", kernels)
    gpu.call("some_kernels", "launch", torch.ones(1), 1, 2)
    assert order == ["guard", (1, 2), "left"]
