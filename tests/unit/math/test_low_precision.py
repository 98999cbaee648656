"""Rounding at random, and 8-bit numbers with scales, against float64 and exact counts."""

import pytest
import torch

from megatron_eopt.math import low_precision
from megatron_eopt.math.low_precision import BLOCK, FORMATS, NEAREST, hashed

SPACING = {"bf16": 2.0**-7, "fp8": 2.0**-3, "int8": None}
"""Between neighbours, of the power of two below them."""


def noise(count: int, key: int = 1) -> torch.Tensor:
    return low_precision.noise_of(torch.tensor(hashed(key)), torch.arange(count))


def blocks(count: int, seed: int = 0) -> torch.Tensor:
    """Return blocks of many sizes, with zeros, float32 ``(count, BLOCK)``."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.arange(count) % 80 - 60.0)
    values = torch.randn(count, BLOCK, generator=generator) * sizes.unsqueeze(1)
    values[:: count // 3, ::5] = 0
    values[1] = 0
    return values


def kept(values: torch.Tensor, name: str, bits: torch.Tensor | int) -> torch.Tensor:
    """Return blocks as they are after they have been kept."""
    numbers, scales = FORMATS[name], None
    if numbers.largest is not None:
        largest = low_precision.magnitude_bits(values).amax(dim=1, keepdim=True)
        scales = low_precision.scales_for(largest, numbers).expand(values.shape)
    codes = low_precision.encoded(values, numbers, bits, scales)
    assert codes.dtype == numbers.dtype
    return low_precision.decoded(codes, scales)


def spacing(values: torch.Tensor, name: str) -> torch.Tensor:
    """Return the distance of the two neighbours around each value, in float64."""
    exact = values.double().abs()
    own = torch.exp2(exact.clamp(min=2.0**-126).log2().floor()) * (SPACING[name] or 0.0)
    largest = FORMATS[name].largest
    if largest is None:
        return own
    most = exact.amax(dim=1, keepdim=True) / largest
    scale = torch.exp2(most.clamp(min=2.0**-126).log2().ceil())
    return scale.expand_as(own) if name == "int8" else torch.maximum(own, 2.0**-9 * scale)


@pytest.mark.parametrize("name", FORMATS)
def test_a_value_becomes_one_of_its_two_neighbours_in_float64(name):
    values = blocks(4000)
    found = kept(values, name, noise(values.numel()).view(values.shape)).double()
    gap = spacing(values, name)
    # a neighbour across a power of two may be nearer, none is farther
    assert ((found - values.double()).abs() < gap).all()
    # where the spacing is fixed float32 has rounded once before, 2^16 times finer
    half = gap * (0.5 + 2**-16)
    assert ((kept(values, name, NEAREST).double() - values.double()).abs() <= half).all()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_kept_stays_whatever_the_noise_also_by_parts_of_a_block(name):
    once = kept(blocks(500), name, noise(500 * BLOCK).view(500, BLOCK))
    for key, part in ((2, slice(None)), (3, slice(0, 7)), (4, slice(7, None))):
        some = once[:, part].contiguous()
        assert torch.equal(kept(some, name, noise(some.numel(), key).view(some.shape)), some)


@pytest.mark.parametrize("name", FORMATS)
def test_over_all_noise_there_is_is_no_bias(name):
    numbers = FORMATS[name]
    every = torch.arange(1 << numbers.dropped) << (32 - numbers.dropped)
    for value in (0.0123, 0.7, -1.37, 3.0, 0.001):
        # no finer than what noise can tell apart
        value = float(torch.tensor(value).mul(2**16).round().div(2**16))
        found = low_precision.rounded(torch.full((len(every),), value), numbers, every)
        assert found.double().mean().item() == value


def test_noise_is_the_same_in_plain_integers_and_even():
    def plain(value: int) -> int:
        value = ((value ^ value >> 16) * 0x7FEB352D) % 2**32
        value = ((value ^ value >> 15) * 0x846CA68B) % 2**32
        return value ^ value >> 16

    counters = [0, 1, 2**31, 2**32 - 1, 123456789]
    assert hashed(torch.tensor(counters)).tolist() == [plain(value) for value in counters]
    assert [hashed(value) for value in counters] == [plain(value) for value in counters]
    found = noise(1 << 16)
    counts = torch.bincount(found >> 24, minlength=256)
    # of 256 counts, binomial with mean 256 and deviation 16
    assert (counts - 256).abs().max() < 6 * 16
    neighbours = (found[1:] >> 16).double().sub(2**15), (found[:-1] >> 16).double().sub(2**15)
    assert abs(torch.corrcoef(torch.stack(neighbours))[0, 1]) < 6 / 256


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("odd", [float("inf"), float("-inf"), float("nan")])
def test_nothing_becomes_finite(name, odd):
    values = blocks(4)
    values[2, 3] = odd
    # a nan all of whose bits are set
    values[3, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    found = kept(values, name, noise(values.numel()).view(values.shape))
    assert not found[2, 3].isfinite()
    assert not found[3, 0].isfinite()
    assert found[:2].isfinite().all()
