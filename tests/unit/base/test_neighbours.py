"""Ranks of one computer read each other's memory, if they may; if one may not, none does."""

import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.base import neighbours
from megatron_eopt.base.neighbours import read_shards
from tests.harness import run_ranks

type Found = tuple[bool, bool]
"""Whether shards were read, and whether all are as their ranks have them."""


def _reader() -> Any:
    return neighbours._reader_of(os.getpid())


@contextmanager
def _with(**changed: Any) -> Iterator[None]:
    """Change this process's reader, which may give up, and put it right again."""
    reader, before = _reader(), dict(vars(_reader()))
    vars(reader).update(changed)
    try:
        yield
    finally:
        vars(reader).update(before)


def _readable() -> bool:
    """Whether the system lets this process read the others'; collective."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numbers: list[Any] = [None] * size
    dist.all_gather_object(numbers, os.getpid())
    dist.barrier()
    try:
        with Path(f"/proc/{numbers[(rank + 1) % size]}/mem").open("rb"):
            mine = True
    except OSError:
        mine = False
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, mine)
    return all(everyone)


def _read(step: int = 0) -> Found:
    rank, size = dist.get_rank(), dist.get_world_size()
    expected = [
        [torch.arange(n, dtype=dtype) + 10 * peer + step for n, dtype in _SHARDS]
        for peer in range(size)
    ]
    shards = [
        [tensor.clone() if peer == rank else torch.zeros_like(tensor) for tensor in tensors]
        for peer, tensors in enumerate(expected)
    ]
    done = read_shards(shards, dist.group.WORLD)  # type: ignore[arg-type]
    right = all(
        torch.equal(a, b)
        for one, other in zip(shards, expected, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    return done, right


_SHARDS = ((3, torch.float32), (0, torch.float32), (50_001, torch.bfloat16))


def _step_by_step() -> tuple[bool, list[Found]]:
    _reader()
    return _readable(), [_read(step) for step in range(3)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_reads_what_the_others_wrote_last(ranks: int) -> None:
    for readable, found in run_ranks(ranks, _step_by_step):
        assert found == [(readable, readable)] * 3


def _in_small_pieces() -> tuple[bool, Found]:
    reader = _reader()
    readable, plain = _readable(), reader.call

    def few_bytes(process: int, here: Any, *others: Any) -> int:
        return plain(process, ctypes.byref(neighbours._Run(here._obj.base, 7)), *others)  # type: ignore[no-any-return]

    with _with(call=plain and few_bytes):
        return readable, _read()


def test_what_comes_in_pieces_is_read_to_its_end() -> None:
    for readable, found in run_ranks(2, _in_small_pieces):
        assert found == (readable, readable)


def _one_cannot(change: Callable[[], dict[str, Any]]) -> list[bool]:
    with _with(**(change() if dist.get_rank() == 1 else {})):
        return [_read()[0], _read()[0]]


def _has_no_such_call() -> dict[str, Any]:
    return {"call": None}


def _is_refused() -> dict[str, Any]:
    ctypes.set_errno(1)
    return {"call": lambda *_: -1}


def _is_taken_for_another() -> dict[str, Any]:
    return {"secret": _reader().secret._replace(number=1)}


@pytest.mark.parametrize("change", [_has_no_such_call, _is_refused, _is_taken_for_another])
def test_if_one_rank_cannot_none_does(change: Callable[[], dict[str, Any]]) -> None:
    assert run_ranks(3, _one_cannot, change) == [[False, False]] * 3


def test_a_process_that_cannot_be_read_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    reader = neighbours._Reader()
    if reader.call is None:
        pytest.skip("this system has no such call")
    into = ctypes.c_int64()
    caplog.set_level(logging.INFO)
    # an address that no process has
    assert not reader.read(os.getpid(), 8, ctypes.addressof(into), 8)
    assert reader.call is None
    [record] = caplog.records
    assert f"process {os.getpid()} is not read" in record.getMessage()
    assert "Bad address" in record.getMessage()
