import logging

import pytest
import torch

from megatron_eopt import cpu


def test_variable_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("cpu", "cuda"):
        monkeypatch.setenv("MEGATRON_EOPT_DEVICE", value)
        assert cpu.choose_device() == value


def test_without_the_variable_the_gpu_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGATRON_EOPT_DEVICE", raising=False)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert cpu.choose_device() == expected
    with cpu.enabled():
        assert torch.cuda.is_available()
        assert cpu.choose_device() == expected


def test_enable_if_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGATRON_EOPT_DEVICE", "cuda")
    assert cpu.enable_if_chosen() == "cuda"
    assert not cpu.is_enabled()
    monkeypatch.setenv("MEGATRON_EOPT_DEVICE", "cpu")
    try:
        with caplog.at_level(logging.INFO):
            assert cpu.enable_if_chosen() == "cpu"
        assert cpu.is_enabled()
        assert "MEGATRON_EOPT_DEVICE=cuda" in caplog.text
    finally:
        cpu.disable()
