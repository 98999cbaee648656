"""Two random number generators, one for the host and one for the "GPU".

With a GPU, host code (data loaders, samplers) has its own generator, so its draws do not change the
model's dropout masks. Resuming depends on that, because a resumed run creates its data loaders
after it has restored the GPU's generator. Here all tensors are on the CPU, so the call decides:

* The host's generator serves new tensors without a device (``rand``, ``randn``, ``randint``,
  ``randperm``, ``normal``) and ``Tensor.random_``, which draws seeds.
* The GPU's generator serves everything else: dropout, ``bernoulli``, ``rand_like``, initial
  weights, and new tensors on a ``torch.device``, as in ``device=x.device`` of model code.

Some torch functions can only use the default generator, so that one is the GPU's. A second one is
the host's; ``torch.get_rng_state``, ``torch.manual_seed`` and similar functions use it.

Separation starts with the first ``torch.cuda.manual_seed``, which Megatron calls at startup. Until
then there is one generator, as on any CPU.
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
"""Torch functions that may draw from the host's generator."""


def _is_hosts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of such a function draws from the host's generator."""
    if func is torch.Tensor.random_:
        return True
    if func is torch.normal and len(args) < 3 and "size" not in kwargs:
        return False  # drawn around the values of a tensor
    # a ``torch.device`` comes from model code, see above; torch's data loaders name no device
    return kwargs.get("device") in (None, "cpu")


def _set_state(new_state: torch.Tensor) -> None:
    _GPUS.set_state(new_state)


def _seed(seed: int) -> None:
    _GPUS.manual_seed(int(seed))


class Generators:
    """Separates and reunites the host's and the GPU's generator."""

    def __init__(self) -> None:
        self._hosts: torch.Generator | None = None
        self._shown = contextlib.ExitStack()

    def arguments(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the call's keyword arguments, with the host's generator if it draws from that.

        ``func`` is in ``MAY_DRAW_FOR_HOST``; devices in ``kwargs`` are not replaced yet.
        """
        if self._hosts is None or not _is_hosts(func, args, kwargs):
            return kwargs
        if kwargs.get("generator") is not None:
            return kwargs
        return {**kwargs, "generator": self._hosts}

    def separate(self) -> None:
        """Give the host its own generator, with the state of the common one."""
        if self._hosts is None:
            self._hosts = torch.Generator()
            # so that a program that never seeds the GPU draws as on any CPU
            self._hosts.set_state(_GPUS.get_state())
            shown = [
                Patch(owner, "default_generator", self._hosts) for owner in (torch, torch.random)
            ]
            self._shown.enter_context(patched(shown))

    def unite(self) -> None:
        """Return to torch's default generator alone, with the state of the host's."""
        if self._hosts is not None:
            _GPUS.set_state(self._hosts.get_state())
            self._shown.close()
            self._hosts = None

    def patches(self) -> list[Patch]:
        """Return the patches of ``torch.cuda``'s random number functions."""
        return [
            *self._of(torch.cuda),
            *self._of(torch.cuda.random),
            Patch(torch.cuda, "default_generators", (_GPUS,)),
            # torch.manual_seed would skip the GPUs of a forked process
            Patch(torch.cuda, "_is_in_bad_fork", lambda: False),
            # activation checkpointing restores generators by the devices of its arguments, which
            # are on the CPU here
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
            # torch.manual_seed calls this too, so it does not show that a program seeds GPUs
            Patch(owner, "manual_seed_all", lambda seed: _seed(seed)),
            Patch(owner, "initial_seed", lambda: _GPUS.initial_seed()),
            Patch(owner, "get_rng_state", lambda device=None: _GPUS.get_state()),
            Patch(owner, "set_rng_state", lambda new_state, device=None: _set_state(new_state)),
            Patch(owner, "get_rng_state_all", lambda: [_GPUS.get_state()]),
            Patch(owner, "set_rng_state_all", lambda states: _set_state(states[0])),
        ]
