import logging

import pytest
import torch

from megatron_eopt import cpu


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_variable_decides(monkeypatch, caplog, device):
    monkeypatch.setenv("MEGATRON_EOPT_DEVICE", device)
    try:
        with caplog.at_level(logging.INFO):
            assert cpu.choose_device() == cpu.enable_if_chosen() == device
        assert cpu.is_enabled() == (device == "cpu") == ("MEGATRON_EOPT_DEVICE" in caplog.text)
    finally:
        cpu.disable()


def test_without_the_variable_the_gpu_decides(monkeypatch):
    monkeypatch.delenv("MEGATRON_EOPT_DEVICE", raising=False)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as Lightning does
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    with cpu.enabled():
        assert torch.cuda.is_available()
        assert cpu.choose_device() == expected
