"""Numbers kept in fewer bits than float32, rounded to the nearest or at random.

8-bit numbers have a scale per block of 32, a power of two in one byte, as in the OCP microscaling
formats (arXiv:2310.10537). So all that is kept is exact in float32, and what is rounded once stays
as it is when it is rounded again, also by parts of a block: a part's own scale is as fine or finer.

The noise of rounding is a hash of counters in integer arithmetic: the same on every device, on
every rank that holds an element, and in a run that goes on from a checkpoint.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

MomentumDtypeT = Literal["fp32", "bf16", "fp8", "int8"]
"""How momentum is kept: ``fp8`` is float8_e4m3fn, and it and ``int8`` have a scale per block."""

MOMENTUM_DTYPES: tuple[MomentumDtypeT, ...] = get_args(MomentumDtypeT)

BLOCK = 32
"""Neighbours in a row that share a scale."""

NEAREST = 1 << 31
"""The noise with which :func:`rounded` rounds to the nearest number."""

_32_BITS = (1 << 32) - 1
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_GOLDEN = 0x9E3779B9


@dataclass(frozen=True)
class NumberFormat:
    """Numbers that are float32 with fewer bits."""

    dtype: torch.dtype  # how they are stored
    dropped: int  # bits of float32's mantissa that they lack
    fixed_below: float = 0.0  # numbers below this power of two have the spacing of those above it
    largest: float | None = None  # to which blocks are scaled; None where nothing is


FORMATS = {
    "bf16": NumberFormat(torch.bfloat16, 16),
    # subnormal below 2^-6
    "fp8": NumberFormat(torch.float8_e4m3fn, 20, 2.0**-6, 448.0),
    # above 128 the spacing would be 1 with 16 bits less
    "int8": NumberFormat(torch.int8, 16, 128.0, 127.0),
}


def hashed[T: (int, Tensor)](value: T) -> T:
    """Return 32 bits mixed well, each from all; a tensor, int64 in [0, 2^32), in place.

    The constants are those of Chris Wellons' ``lowbias32``.
    """
    value ^= value >> 16
    value *= 0x7FEB352D
    value &= _32_BITS
    value ^= value >> 15
    # minus 2^32, so that no product leaves 64 bits
    value *= 0x846CA68B - (1 << 32)
    value &= _32_BITS
    value ^= value >> 16
    return value


def noise_of(row_keys: Tensor, columns: Tensor) -> Tensor:
    """Return 32 random bits for each element, from a hash of all that its row is and its column."""
    return hashed((row_keys + columns * _GOLDEN) & _32_BITS)


def rounded(values: Tensor, numbers: NumberFormat, noise: Tensor | int) -> Tensor:
    """Return float32 values rounded to a format, up or down as 32 random bits say, without bias.

    A value of the format stays what it is. Magnitudes must not exceed the largest of the format;
    inf and nan stay.
    """
    magnitudes = values.abs()
    # those of a fixed spacing are moved to where float32's, with bits dropped, is the same
    shift = torch.where(magnitudes < numbers.fixed_below, numbers.fixed_below, 0.0)
    bits = magnitudes.add_(shift).view(torch.int32).clamp_(max=_NAN)
    noise = noise >> (32 - numbers.dropped)
    bits += noise.to(torch.int32) if isinstance(noise, Tensor) else noise
    bits &= -1 << numbers.dropped
    return bits.view(torch.float32).sub_(shift).copysign_(values)


def magnitude_bits(values: Tensor) -> Tensor:
    """Return integers, int32, in the order of the values' magnitudes, inf and nan the largest."""
    return values.view(torch.int32) & 0x7FFFFFFF


def scales_for(largest_bits: Tensor, numbers: NumberFormat) -> Tensor:
    """Return blocks' scales, uint8 exponents of two with an offset of 127; 255 for inf and nan.

    ``largest_bits`` are :func:`magnitude_bits` of each block's largest value. A scale is the
    smallest power of two that brings it into the format.
    """
    assert numbers.largest is not None
    mantissa, exponent = math.frexp(numbers.largest)
    # carries into the exponent where a mantissa is larger than that of the largest number
    carry = (1 << 24) - 1 - int(mantissa * (1 << 24))
    found = ((largest_bits.clamp(max=_INFINITY) + carry) >> 23) - (exponent - 1)
    return torch.where(largest_bits < _INFINITY, found.clamp_(min=1), 255).to(torch.uint8)


def encoded(
    values: Tensor, numbers: NumberFormat, noise: Tensor | int, scales: Tensor | None = None
) -> Tensor:
    """Return float32 values in a format, with the scale of each, if it has such."""
    if scales is not None:
        values = values * _power_of_two(254 - scales.to(torch.int32))
    return rounded(values, numbers, noise).to(numbers.dtype)


def decoded(codes: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return what :func:`encoded` has kept, exactly, in float32."""
    values = codes.to(torch.float32)
    return values if scales is None else values.mul_(_power_of_two(scales.to(torch.int32)))


def _power_of_two(exponents: Tensor) -> Tensor:
    return (exponents << 23).view(torch.float32)
