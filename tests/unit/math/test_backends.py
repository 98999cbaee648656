import importlib.util

import pytest
import torch
from torch import Tensor

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.math import backends
from megatron_eopt.math.algorithm import Plan
from megatron_eopt.math.backends import Backend, register_backend
from megatron_eopt.math.coefficients import Triple
from megatron_eopt.math.orthogonalize import orthogonalize
from tests.unit.math.spectra import gaussian

NO_GPU = not torch.cuda.is_available()
PACKAGES = {
    "transformer_engine": "transformer-engine",
    "gram_newton_schulz": "gram-newton-schulz",
}


@pytest.mark.parametrize("name", PACKAGES)
def test_an_absent_package_is_named_with_its_install_command(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    with pytest.raises(
        ConfigurationError, match=rf"backend='{name}'.*pip install.*{PACKAGES[name]}"
    ):
        orthogonalize(gaussian(4, 6), backend=name)


@pytest.mark.skipif(NO_GPU, reason="needs a GPU")
def test_syrk_equals_torch() -> None:
    x = gaussian(256, 512).cuda()
    expected = orthogonalize(x, precision="medium", algorithm="standard")
    result = orthogonalize(x, precision="medium", backend="syrk")
    # two orders of bfloat16 arithmetic
    assert (result - expected).norm() < 1.7e-2 * expected.norm()


def _sign(wide: Tensor, schedule: tuple[Triple, ...], plan: Plan, eps: float) -> Tensor:
    assert wide.shape[-2] <= wide.shape[-1]
    assert (len(schedule), plan.algorithm, eps) == (5, "standard", 1e-6)
    return wide.sign()


def test_a_backend_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_LOADED", {})
    register_backend("sign", Backend(_sign))
    x = gaussian(6, 4)
    assert torch.equal(orthogonalize(x, backend="sign", eps=1e-6), x.sign())
    with pytest.raises(ConfigurationError, match=r"algorithm='gram'.*'sign' computes standard"):
        orthogonalize(x, backend="sign", algorithm="gram")
    with pytest.raises(ConfigurationError, match=r"backend='sign': computes whole matrices"):
        orthogonalize(x, backend="sign", reduce=torch.clone, whole_shape=(12, 4))
    register_backend("half", Backend(_sign, half=True))
    with pytest.raises(ConfigurationError, match=r"backend='half': computes in 16 bits"):
        orthogonalize(x, backend="half")
