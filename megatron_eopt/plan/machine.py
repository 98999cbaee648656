"""What GPUs can do, as far as the time of an optimizer's step depends on it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_eopt.base.errors import check_choice, check_number


@dataclass(frozen=True)
class Machine:
    """A GPU and its links. Own numbers: :func:`dataclasses.replace`, or :func:`machine`.

    Attributes:
        name: What it is called.
        flops: Dense bfloat16 operations a second, at most.
        memory: Bytes a second between its memory and its cores.
        link: Bytes a second that it sends to GPUs of its computer.
        network: Bytes a second that it sends to other computers.
        gpus: GPUs of a computer.
        efficiency: Share of ``flops`` that matrix products reach, at most 1.
        latency: Seconds until a collective begins to move data.

    Raises:
        ConfigurationError: If a number is not positive, or the efficiency above 1.
    """

    name: str
    flops: float
    memory: float
    link: float
    network: float
    gpus: int = 8
    efficiency: float = 0.6
    latency: float = 1e-5

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self)[1:]:
            at_most = 1 if field.name == "efficiency" else None
            value = getattr(self, field.name)
            check_number(f"machine.{field.name}", value, above=0, at_most=at_most)


MACHINES = {
    item.name: item
    for item in (
        Machine("A100", 312e12, 2.04e12, 300e9, 25e9),
        Machine("H100", 989e12, 3.35e12, 450e9, 50e9),
        Machine("H200", 989e12, 4.8e12, 450e9, 50e9),
        Machine("B200", 2250e12, 8e12, 900e9, 50e9),
    )
}
"""NVIDIA's data sheets of the SXM modules: bfloat16 without sparsity, NVLink in one direction, and
one network adapter of 200 (A100) or 400 Gbit/s for each GPU, as in its DGX computers."""


def machine(name: str, numbers: Mapping[str, float] | None = None) -> Machine:
    """Return a machine of :data:`MACHINES`, with other numbers where given.

    Raises:
        ConfigurationError: If there is none of that name, or a number is out of its bounds.
    """
    check_choice("machine", name, MACHINES)
    given = {key: value for key, value in (numbers or {}).items() if value is not None}
    return dataclasses.replace(MACHINES[name], **given)  # type: ignore[arg-type]
