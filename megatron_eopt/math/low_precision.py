"""Rounding of float32 to fewer bits, to the nearest value or stochastically.

The 8-bit formats share one scale per block of 32 values: a power of two in one byte, as in the OCP
microscaling formats (arXiv:2310.10537). A rounded value is exact in float32, and rounding it again
does not change it, even in a smaller block, whose scale is as fine or finer.

The noise of stochastic rounding is a hash of counters in integer arithmetic. It is the same on
every device, on every rank that holds an element, and after resuming from a checkpoint.
"""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

MomentumDtypeT = Literal["fp32", "bf16", "fp8", "int8"]
"""Storage format of momentum: ``fp8`` (float8_e4m3fn) and ``int8`` have one scale per block."""

MOMENTUM_DTYPES: tuple[MomentumDtypeT, ...] = get_args(MomentumDtypeT)

BLOCK = 32
"""Number of neighbouring values of a row that share a scale."""

NEAREST = 1 << 31
"""The noise that makes :func:`rounded` round to the nearest value."""

_32_BITS = (1 << 32) - 1
_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_GOLDEN = 0x9E3779B9


@dataclass(frozen=True)
class NumberFormat:
    """A format whose values are a subset of float32's."""

    dtype: torch.dtype  # of the stored values
    dropped: int  # bits removed from float32's mantissa
    fixed_below: float = 0.0  # values below this power of two are spaced like those just above it
    largest: float | None = None  # largest value, to which blocks are scaled; None without scales


FORMATS = {
    "bf16": NumberFormat(torch.bfloat16, 16),
    # subnormal below 2^-6
    "fp8": NumberFormat(torch.float8_e4m3fn, 20, 2.0**-6, 448.0),
    # with 16 bits dropped the spacing is 1 from 128 on, and smaller values get the same spacing
    "int8": NumberFormat(torch.int8, 16, 128.0, 127.0),
}


def hashed[T: (int, Tensor)](value: T) -> T:
    """Return a 32-bit hash of a 32-bit value; hashes an int64 tensor in [0, 2^32) in place.

    The constants are those of Chris Wellons' ``lowbias32``.
    """
    # int64 for tensors, because torch's uint32 lacks most operators; masks keep 32 bits
    value ^= value >> 16
    value *= 0x7FEB352D
    value &= _32_BITS
    value ^= value >> 15
    # 2^32 is subtracted so that products fit into 64 bits
    value *= 0x846CA68B - (1 << 32)
    value &= _32_BITS
    value ^= value >> 16
    return value


def noise_of(row_keys: Tensor, columns: Tensor) -> Tensor:
    """Return 32 random bits per element, a hash of the element's row key and column."""
    return hashed((row_keys + columns * _GOLDEN) & _32_BITS)


def rounded(values: Tensor, numbers: NumberFormat, noise: Tensor | int) -> Tensor:
    """Round float32 values to a format, up or down by 32 random bits, without bias.

    Values of the format, inf and nan do not change. Other magnitudes must not exceed the format's
    largest value.
    """
    magnitudes = values.abs()
    # values with a fixed spacing are shifted to where float32 without the bits has that spacing
    shift = torch.where(magnitudes < numbers.fixed_below, numbers.fixed_below, 0.0)
    # nan becomes the one with the fewest bits set, so that adding noise cannot reach the sign bit
    bits = magnitudes.add_(shift).view(torch.int32).clamp_(max=_NAN)
    # The sum carries into the kept bits with a probability that is the dropped fraction, so that
    # rounding has no bias. Then the dropped bits are cleared.
    noise = noise >> (32 - numbers.dropped)
    bits += noise.to(torch.int32) if isinstance(noise, Tensor) else noise
    bits &= -1 << numbers.dropped
    return bits.view(torch.float32).sub_(shift).copysign_(values)


def magnitude_bits(values: Tensor) -> Tensor:
    """Return int32 values in the order of float32 magnitudes; inf and nan are the largest."""
    return values.view(torch.int32) & 0x7FFFFFFF


def scales_for(largest_bits: Tensor, numbers: NumberFormat) -> Tensor:
    """Return blocks' scales: uint8 exponents of two with an offset of 127; 255 for inf and nan.

    ``largest_bits`` has :func:`magnitude_bits` of each block's largest value. Dividing by the
    scale, the smallest suitable power of two, brings that value into the format.
    """
    assert numbers.largest is not None
    mantissa, exponent = math.frexp(numbers.largest)
    # adding this carries into the exponent if the mantissa exceeds that of the format's largest
    carry = (1 << 24) - 1 - int(mantissa * (1 << 24))
    found = ((largest_bits.clamp(max=_INFINITY) + carry) >> 23) - (exponent - 1)
    # An exponent of 0 would decode as a scale of 0. One of 255 decodes as inf: a block with inf or
    # nan stays non-finite, whatever its codes are.
    return torch.where(largest_bits < _INFINITY, found.clamp_(min=1), 255).to(torch.uint8)


def encoded(
    values: Tensor, numbers: NumberFormat, noise: Tensor | int, scales: Tensor | None = None
) -> Tensor:
    """Return float32 values in a format's dtype, each divided by its scale if there are scales."""
    if scales is not None:
        # the reciprocal of 2^(s - 127); powers of two are exact, so division costs no accuracy
        values = values * _power_of_two(254 - scales.to(torch.int32))
    return rounded(values, numbers, noise).to(numbers.dtype)


def decoded(codes: Tensor, scales: Tensor | None = None) -> Tensor:
    """Return the exact float32 values of what :func:`encoded` returned."""
    values = codes.to(torch.float32)
    return values if scales is None else values.mul_(_power_of_two(scales.to(torch.int32)))


def _power_of_two(exponents: Tensor) -> Tensor:
    return (exponents << 23).view(torch.float32)
