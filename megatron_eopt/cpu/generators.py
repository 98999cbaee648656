"""Two generators of random numbers, as on a machine with a GPU.

There, code on the host (data loaders, samplers) has a generator of its own, and what it draws does
not change the dropout masks of the model. A run that goes on from a checkpoint relies on that: it
makes its data loaders after it has restored the GPU's generator, the run in one go made them long
before. Here all tensors are on the CPU, so the kind of a draw must tell whose it is:

* New tensors for which no device is named (``rand``, ``randn``, ``randint``, ``randperm``,
  ``normal``), and ``Tensor.random_``, which is how seeds are drawn, come from the host's generator.
* Everything else is drawn for tensors that a model computes with (dropout, ``bernoulli``,
  ``rand_like``, initial weights) and comes from the GPU's. So do new tensors on a device that is
  given as a ``torch.device``: model code writes ``device=x.device``, which says ``cpu`` here.

Torch's functions reach its default generator in C++, and some take no other. So that one plays the
GPU's. The host's is a second one, which ``torch.get_rng_state``, ``torch.manual_seed`` and their
like get to see in its place.

There are two from the first call of ``torch.cuda.manual_seed`` on, which Megatron makes while it
starts. A program that never seeds the GPU by itself has one generator, as on any CPU.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import checkpoint

from megatron_eopt.cpu.patches import Patch, patched

_GPUS = torch.default_generator

MAY_DRAW_FOR_HOST = frozenset(
    {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.Tensor.random_}
)
"""Functions of torch some of whose calls draw from the host's generator."""


def _is_hosts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of one of them does."""
    if func is torch.Tensor.random_:
        return True
    if func is torch.normal and len(args) < 3 and "size" not in kwargs:
        return False  # drawn around the values of a tensor
    return kwargs.get("device") in (None, "cpu")


def _set_state(new_state: torch.Tensor) -> None:
    _GPUS.set_state(new_state)


def _seed(seed: int) -> None:
    _GPUS.manual_seed(int(seed))


class Generators:
    """Knows whether the host has a generator of its own."""

    def __init__(self) -> None:
        self._hosts: torch.Generator | None = None
        self._shown = contextlib.ExitStack()

    def arguments(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return a call's keyword arguments, the host's generator among them if it draws from it.

        Is for functions of ``MAY_DRAW_FOR_HOST`` alone, and must see the devices that the call
        names before they are changed.
        """
        if self._hosts is None or not _is_hosts(func, args, kwargs):
            return kwargs
        if kwargs.get("generator") is not None:
            return kwargs
        return {**kwargs, "generator": self._hosts}

    def separate(self) -> None:
        """Give the host a generator of its own, which goes on where the common one stood."""
        if self._hosts is None:
            self._hosts = torch.Generator()
            self._hosts.set_state(_GPUS.get_state())
            shown = [
                Patch(owner, "default_generator", self._hosts) for owner in (torch, torch.random)
            ]
            self._shown.enter_context(patched(shown))

    def unite(self) -> None:
        """Leave one generator, torch's default one, which goes on where the host's stood."""
        if self._hosts is not None:
            _GPUS.set_state(self._hosts.get_state())
            self._shown.close()
            self._hosts = None

    def patches(self) -> list[Patch]:
        """Return the stand-ins for what ``torch.cuda`` offers for generators."""
        return [
            *self._of(torch.cuda),
            *self._of(torch.cuda.random),
            Patch(torch.cuda, "default_generators", (_GPUS,)),
            # torch.manual_seed passes over the GPUs of a process that was forked
            Patch(torch.cuda, "_is_in_bad_fork", lambda: False),
            # torch's own recomputation restores the generators of devices that it finds among its
            # arguments, which are on the CPU here
            Patch(checkpoint.DefaultDeviceType, "_default_device_type", "cuda"),
            Patch(checkpoint, "get_device_states", lambda *args: ([0], [_GPUS.get_state()])),
            Patch(torch.cuda, "_initialized", True),
        ]

    def _of(self, owner: Any) -> list[Patch]:
        def manual_seed(seed: int) -> None:
            self.separate()
            _seed(seed)

        return [
            Patch(owner, "manual_seed", manual_seed),
            # part of torch.manual_seed, so it tells nothing about what a program does with GPUs
            Patch(owner, "manual_seed_all", lambda seed: _seed(seed)),
            Patch(owner, "initial_seed", lambda: _GPUS.initial_seed()),
            Patch(owner, "get_rng_state", lambda device=None: _GPUS.get_state()),
            Patch(owner, "set_rng_state", lambda new_state, device=None: _set_state(new_state)),
            Patch(owner, "get_rng_state_all", lambda: [_GPUS.get_state()]),
            Patch(owner, "set_rng_state_all", lambda states: _set_state(states[0])),
        ]
