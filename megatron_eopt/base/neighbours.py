"""Reads memory of other processes of a computer, which then need not send it.

Note [Reading a neighbour's memory]
    A socket between two processes copies what it carries twice, piece by piece. Linux can copy once
    from one process to another (``process_vm_readv(2)``), which MPI libraries call cross-memory
    attach: a quarter of the time for the weights of a model. Containers and computers number their
    processes each for themselves, and some systems forbid it, so it is tried first: a rank reads a
    random number that its peer has announced. If one rank of a group cannot read another's memory,
    all send, and that rank says so from then on.
"""

import ctypes
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_SET_PTRACER = 0x59616D61
"""Of prctl(2): names a process that may read this one's memory, with all that it started. Where
Linux asks for it (Yama), processes that one launcher started can read each other's afterwards."""


class _Run(ctypes.Structure):
    """Bytes one after another, as ``struct iovec``."""

    _fields_ = (("base", ctypes.c_void_p), ("size", ctypes.c_size_t))


class _Secret(NamedTuple):
    address: int
    number: int


class _Reader:
    """This process's ability to read others' memory."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.call: Callable[..., int] | None = getattr(libc, "process_vm_readv", None)
        self._number = ctypes.c_int64(secrets.randbits(63))
        self.secret = _Secret(ctypes.addressof(self._number), self._number.value)
        if self.call is None:
            return
        run, count = ctypes.POINTER(_Run), ctypes.c_ulong
        libc.process_vm_readv.argtypes = [ctypes.c_int, run, count, run, count, count]
        libc.process_vm_readv.restype = ctypes.c_ssize_t
        if os.getppid() > 1:
            libc.prctl(_SET_PTRACER, ctypes.c_ulong(os.getppid()), *[ctypes.c_ulong(0)] * 3)

    def finds(self, process: int, secret: _Secret) -> bool:
        """Return whether that process can be read and has this secret."""
        found = ctypes.c_int64()
        if not self.read(process, secret.address, ctypes.addressof(found), 8):
            return False
        if found.value != secret.number:
            self._give_up(process, "it is another one that has this number here")
            return False
        return True

    def read(self, process: int, address: int, into: int, size: int) -> bool:
        """Copy bytes of a process; return whether all of them came."""
        while size > 0:
            here, there = _Run(into, size), _Run(address, size)
            assert self.call is not None
            # a call copies 2 GiB at most
            count = self.call(process, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if count <= 0:
                self._give_up(process, os.strerror(ctypes.get_errno()))
                return False
            address, into, size = address + count, into + count, size - count
        return True

    def _give_up(self, process: int, why: str) -> None:
        logger.info("Memory of process %d is not read, so weights are sent: %s.", process, why)
        self.call = None


@cache
def _reader_of(process: int) -> _Reader:
    return _Reader()


def read_shards(shards: Sequence[Sequence[Tensor]], group: dist.ProcessGroup) -> bool:
    """Bring every rank's shards to all ranks by reading them; collective.

    Args:
        shards: Of every rank of the group a list of contiguous tensors on a CPU, of equal sizes and
            dtypes on all ranks. This rank's own have their data, the others' are written.
        group: Ranks of gloo.

    Returns:
        Whether it was done, the same on every rank: no if one cannot read another's memory. Shards
        of others may have been written then.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    process = os.getpid()
    reader = _reader_of(process)
    announced = [process if reader.call else 0, *reader.secret]
    addresses = [shard.data_ptr() for shard in shards[rank]]
    own = torch.tensor([*announced, *addresses], device="cpu")
    announcements = own.new_empty(size * own.numel())
    # nobody announces before its shards are written
    dist.all_gather_into_tensor(announcements, own, group=group)
    peers = announcements.view(size, -1).tolist()
    if not all(process for process, *_ in peers):
        return False
    done = True
    for peer, (process, address, number, *addresses) in enumerate(peers):
        if peer == rank:
            continue
        done = done and reader.finds(process, _Secret(address, number))
        for start, into in zip(addresses, shards[peer], strict=True):
            done = done and reader.read(process, start, into.data_ptr(), into.nbytes)
    # nobody goes on before its shards are read
    failures = torch.tensor(int(not done), device="cpu")
    dist.all_reduce(failures, group=group)
    return not failures.item()
