"""The model's weights beside float32 main weights."""

from collections.abc import Iterable

from torch import Tensor

from megatron_eopt.base.names import COPY_ATTRIBUTE


def model_copies_of(mains: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the model's weights that the caller must write with main weights, or None.

    They are not copied again after the step.
    """
    return [main.__dict__.pop(COPY_ATTRIBUTE, None) for main in mains]
