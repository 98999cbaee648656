"""Memory that is kept from one computation to the next, and never holds a result."""

import gc
from itertools import cycle
from threading import Thread

import pytest
import torch
from torch import Tensor

from megatron_eopt.base.live_bytes import LiveBytes
from megatron_eopt.math.coefficients import resolve_coefficients
from megatron_eopt.math.newton_schulz import PLACES, Shifted, accumulate, gram_residual
from megatron_eopt.math.orthogonalize import Orthogonalization, orthogonalize
from megatron_eopt.math.products import like_a_gpu
from megatron_eopt.math.scratch import LARGEST, remembered, scratch, small_matrices

LIKE = torch.empty(0)


def address(name: str, *shape: int, like: Tensor = LIKE, dtype: torch.dtype | None = None) -> int:
    piece = scratch(name, shape, like, dtype)
    assert piece is not None
    assert piece.shape == shape
    assert piece.is_contiguous()
    assert piece.dtype == (dtype or like.dtype)
    return piece.data_ptr()


def test_a_name_has_its_memory() -> None:
    kept = address("a", 4, 5)
    assert address("a", 20) == kept
    assert address("a", 2, 2) == kept
    assert address("b", 4, 5) != kept
    assert address("a", 4, 5, dtype=torch.bfloat16) != kept


def test_more_is_asked_for_once() -> None:
    address("growing", 10)
    kept = address("growing", 1000)
    assert address("growing", 10) == kept
    assert address("growing", 1000) == kept


def test_another_thread_has_its_own() -> None:
    kept, found = address("a", 4, 5), list[int]()
    thread = Thread(target=lambda: found.append(address("a", 4, 5)))
    thread.start()
    thread.join()
    assert found != [kept]


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_nothing_is_kept_of_what_is_large_or_elsewhere(device: str) -> None:
    like = torch.empty(0, device=device)
    shape = (1,) if device == "meta" else (LARGEST // 4 + 1,)
    assert scratch("neither", shape, like) is None


def test_nothing_is_kept_as_on_a_gpu() -> None:
    with like_a_gpu():
        assert scratch("neither", (1,), LIKE) is None


@pytest.mark.parametrize("steps", [4, 5])
def test_what_is_not_kept_is_there_while_it_is_needed(steps: int) -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    compute = Orthogonalization(steps=steps, algorithm="gram")
    gc.collect()
    with like_a_gpu(), LiveBytes() as seen:
        compute(x, in_place=True)
    small = 4 * 64 * 64
    # a second iterate and the small matrices of a product; all places at once would be more
    assert seen.peak <= x.nbytes + (PLACES + 1) * small


def halves(matrix: Tensor, columns: int, add: Tensor | None) -> tuple[Tensor, Tensor]:
    assert add is None or add.shape == matrix.shape
    return matrix[:, :columns], matrix[:, columns:]


def test_views_are_made_once_for_memory_that_is_kept() -> None:
    def piece(*shape: int) -> Tensor:
        found = scratch("viewed", shape, LIKE)
        assert found is not None
        return found

    made = remembered(halves, piece(4, 6), 2, None)
    assert remembered(halves, piece(4, 6), 2, None) is made
    # another shape, width, order or tensor more, at the same address
    for matrix, columns, add in [
        (piece(3, 8), 2, None),
        (piece(4, 6), 3, None),
        (piece(6, 4).mT, 2, None),
        (piece(4, 6), 2, piece(4, 6)),
    ]:
        # memory that was never written may hold nan, which equals nothing
        matrix.copy_(torch.arange(matrix.numel()).view(matrix.shape))
        left, right = remembered(halves, matrix, columns, add)
        assert torch.equal(torch.cat([left, right], 1), matrix)
        assert left.shape[1] == columns
    piece(100, 100)
    assert remembered(halves, piece(4, 6), 2, None)[0].data_ptr() == piece(1).data_ptr()


def test_views_of_other_memory_are_not_remembered() -> None:
    own, kept = torch.empty(4, 6), scratch("viewed", (4, 6), LIKE)
    for matrix, add in [(own, None), (own, kept), (kept, own)]:
        assert isinstance(matrix, Tensor)
        assert remembered(halves, matrix, 2, add) is not remembered(halves, matrix, 2, add)
    meta = torch.empty(4, 6, device="meta")
    assert remembered(halves, meta, 2, None)[0].device == meta.device


def test_so_many_views_are_remembered() -> None:
    kept = scratch("viewed", (4, 600), LIKE)
    assert kept is not None
    first = remembered(halves, kept, 0, None)
    for columns in range(600):
        remembered(halves, kept, columns, None)
    assert remembered(halves, kept, 0, None) is not first


def test_what_inference_made_others_may_write_to() -> None:
    def fill() -> None:
        piece = scratch("made in inference mode", (3,), LIKE)
        assert piece is not None
        piece.zero_()

    with torch.inference_mode():
        fill()
    fill()


@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("shape", [(8, 20), (20, 8), (3, 8, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_result_lies_in_it(
    algorithm: str, steps: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    def compute(seed: int) -> Tensor:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
        precision = "medium" if dtype == torch.bfloat16 else "highest"
        return orthogonalize(x, algorithm=algorithm, steps=steps, precision=precision)

    one = compute(1)
    kept = one.clone()
    compute(2)
    assert torch.equal(one, kept)


@pytest.mark.parametrize("shifted", [False, True])
def test_a_segment_needs_no_more_places(shifted: bool) -> None:
    x = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x /= torch.linalg.matrix_norm(x)
    a = gram_residual(x, 1 / 6 if shifted else 0.0)
    triples = resolve_coefficients("quintic", 8)
    expected = accumulate(a, triples, shifted=shifted)
    around = cycle(a.residual.new_empty((PLACES, *a.residual.shape)))
    first = Shifted(a.shift, next(around).copy_(a.residual))
    found = accumulate(first, triples, shifted=shifted, places=around)
    assert found.shift == expected.shift
    assert torch.equal(found.residual, expected.residual)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_matrices_that_are_taken_alone_lie_apart(
    tiles: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = f"{scratch.__module__}.multiplies_by_tiles"
    monkeypatch.setattr(asked, lambda dtype: dtype.itemsize == 2 and tiles)
    one, two = (
        small_matrices(2, torch.empty(*batch, 8, 20, dtype=dtype, device="cpu"), 8)
        for batch in ((), (3,))
    )
    assert one is not None
    assert two is not None
    assert one.shape == (2, 8, 8)
    assert two.shape == (2, 3, 8, 8)
    together = tiles and dtype == torch.bfloat16
    assert one.stride(1) == (8 if together else 8 + 64 // dtype.itemsize)
    assert two.is_contiguous()
