import importlib.util
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.base import gpu
from megatron_eopt.base.agreement import answered_by
from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.config.checks import check_alike
from megatron_eopt.math import backends
from megatron_eopt.math.algorithm import IterationPlan
from megatron_eopt.math.backends import Backend, register_backend
from megatron_eopt.math.orthogonalize import Orthogonalization, orthogonalize
from tests.unit.math.spectra import gaussian

PACKAGES = {"transformer_engine": "transformer-engine", "gram_newton_schulz": "gram-newton-schulz"}


@pytest.mark.parametrize("name", PACKAGES)
def test_an_absent_package_is_named_with_its_install_command(name):
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    named = rf"backend='{name}'.*pip install.*{PACKAGES[name]}"
    with pytest.raises(ConfigurationError, match=named):
        orthogonalize(gaussian(4, 6), backend=name)


def refuse(*_):
    raise RuntimeError("not compiled with cuSolverMp")


@pytest.mark.parametrize("late", [False, True])
def test_transformer_engine_without_its_library_is_refused(monkeypatch, late):
    """Some wheels have the functions, but not the library that these call."""
    context = (lambda group: object()) if late else refuse
    module = SimpleNamespace(CusolverMpCtx=context, newton_schulz_tp=refuse)
    monkeypatch.setattr(backends, "find_spec", lambda name: module)
    monkeypatch.setattr(backends, "import_module", lambda name: module)
    monkeypatch.setattr(gpu, "is_there", lambda: True)
    monkeypatch.setattr(backends.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(backends.dist, "get_world_size", lambda group: 1)
    eye = torch.eye
    monkeypatch.setattr(torch, "eye", lambda *args, device, **kwargs: eye(*args, **kwargs))
    with pytest.raises(ConfigurationError, match=r"'transformer_engine'.*cuSolverMp"):
        backends.transformer_engine()


def _sign(wide, schedule, plan, eps):
    assert wide.shape[-2] <= wide.shape[-1]
    assert (len(schedule), plan.algorithm, eps) == (5, "standard", 1e-6)
    return wide.sign()


def test_a_backend_of_ones_own(monkeypatch):
    monkeypatch.setattr(backends, "_LOADED", {})
    register_backend("sign", Backend(_sign))
    x = gaussian(6, 4)
    assert torch.equal(orthogonalize(x, backend="sign", eps=1e-6), x.sign())
    with pytest.raises(ConfigurationError, match=r"algorithm='gram'.*supports only standard"):
        orthogonalize(x, backend="sign", algorithm="gram")
    with pytest.raises(ConfigurationError, match=r"backend='sign': computes whole matrices"):
        orthogonalize(x, backend="sign", reduce=torch.clone, whole_shape=(12, 4))
    register_backend("half", Backend(_sign, half=True))
    with pytest.raises(ConfigurationError, match=r"backend='half': computes in 16 bits"):
        orthogonalize(x, backend="half")


INSTALLED = {"gram_newton_schulz", "quack"}


@pytest.mark.parametrize(
    ("installed", "capability", "taken", "why"),
    [
        (INSTALLED, (9, 0), "gram_newton_schulz", "its kernels support this GPU"),
        (INSTALLED, (10, 0), "gram_newton_schulz", "its kernels support this GPU"),
        (INSTALLED, (8, 0), "torch", "no kernels for compute capability 8.0"),
        ({"gram_newton_schulz"}, (9, 0), "torch", "quack is not installed"),
        (set(), (9, 0), "torch", "gram_newton_schulz is not installed"),
        (INSTALLED, None, "torch", "no NVIDIA GPU is visible"),
    ],
)
def test_auto_takes_what_serves_the_machine_and_says_so_once(
    monkeypatch, caplog, installed, capability, taken, why
):
    """Neither GPUs nor packages for them are where this runs."""
    monkeypatch.setattr(backends, "find_spec", lambda name: name in installed or None)
    monkeypatch.setattr(gpu, "is_there", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    # what it asks of a GPU that is not here
    monkeypatch.setattr(backends.GRAM_NEWTON_SCHULZ, "runs", lambda tensor: True)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **_: empty(*size))
    backends._tell.cache_clear()
    caplog.set_level(logging.INFO, "megatron_eopt")
    assert [backends.automatic() for _ in range(2)] == [taken] * 2
    backends._tell.cache_clear()
    (line,) = caplog.messages
    assert f"uses {taken}" in line
    assert why in line


def test_auto_leaves_to_our_own_iteration_what_the_package_is_not_for(monkeypatch):
    plans = []

    def sign(wide, schedule, plan, eps):
        plans.append(plan)
        return wide.sign()

    monkeypatch.setattr(backends, "_LOADED", {})
    monkeypatch.setattr(backends, "automatic", lambda: "gram_newton_schulz")
    register_backend("gram_newton_schulz", Backend(sign, ("gram", "standard"), half=True))
    x = gaussian(256, 260)

    def is_own(x, more=None, **settings):
        compute = Orthogonalization(**{"backend": "auto", "precision": "medium"} | settings)
        # so that the same matrices travel and the same ranks share them as with torch
        assert not compute.whole_only
        assert compute.stack_dtype == Orthogonalization(precision=compute.precision).stack_dtype
        return not torch.equal(compute(x, **(more or {})), x.sign())

    assert not is_own(x)
    assert plans.pop() == IterationPlan("gram", (2,), torch.float16)
    assert not is_own(x, algorithm="standard")
    assert is_own(x, {"reduce": torch.clone, "whole_shape": (256, 260)})
    assert is_own(gaussian(255, 600))
    assert all(is_own(x, precision=precision) for precision in ("high", "highest"))
    # outside of the study
    assert is_own(x, coefficients="cans")


def install_package(monkeypatch, solver):
    """Let gram_newton_schulz be there, on a GPU, with this class."""
    monkeypatch.setattr(backends, "_LOADED", {})
    monkeypatch.setattr(backends, "find_spec", lambda name: name)
    monkeypatch.setattr(backends.gpu, "is_there", lambda: True)
    monkeypatch.setitem(sys.modules, "gram_newton_schulz", SimpleNamespace(GramNewtonSchulz=solver))


def test_gram_newton_schulz_changes_nothing_of_its_callers_and_captures_no_graphs(monkeypatch):
    made = []

    class Solver:
        def __init__(self, **options):
            made.append(options)

        def __call__(self, x):
            # as release 0.1.5 does to float32
            return x.float().div_(x.norm()).half().to(x.dtype)

    install_package(monkeypatch, Solver)
    x = gaussian(256, 260)
    kept = x.clone()
    orthogonalize(x, backend="gram_newton_schulz", precision="medium")
    assert torch.equal(x, kept)
    (options,) = made
    # its default is a mode with CUDA graphs
    assert "mode" not in options["compile_kwargs"]


def test_a_failing_package_says_how_to_do_without(monkeypatch):
    def broken(**options):
        raise ValueError("no cubin")

    install_package(monkeypatch, broken)
    how = {"backend": "gram_newton_schulz", "precision": "medium"}
    with pytest.raises(RuntimeError, match=r"no cubin.*MEGATRON_EOPT_KERNELS=0"):
        orthogonalize(gaussian(256, 260), **how)
    # which works for a package that was chosen by name, too
    monkeypatch.setenv("MEGATRON_EOPT_KERNELS", "0")
    x = gaussian(256, 260)
    assert torch.equal(orthogonalize(x, **how), orthogonalize(x, precision="medium"))


def check_is_refused_beside(name, value, message):
    """Check what is said where another rank has this value, if it is told of the name."""

    def gather_objects(mine, group):
        return [mine, {**mine, name: value} if name in mine else mine]

    peers = SimpleNamespace(gather_objects=gather_objects)
    with answered_by(peers), pytest.raises(ConfigurationError, match=message):
        check_alike(EmergingOptimizerConfig())


def test_ranks_whose_hosts_have_other_packages_are_told_so():
    told = r"'gram_newton_schulz'.*'torch'.*same packages"
    check_is_refused_beside("muon_backend", "gram_newton_schulz", told)


@pytest.mark.parametrize("package", backends.PACKAGES)
def test_ranks_with_gpus_have_the_same_packages(monkeypatch, package):
    monkeypatch.setattr("megatron_eopt.config.checks.gpu.is_there", lambda: True)
    monkeypatch.setattr("megatron_eopt.config.checks.kernels.agree", lambda wanted: None)
    monkeypatch.setattr("megatron_eopt.config.checks.automatic", lambda: "torch")
    check_is_refused_beside(package, True, rf"{package}=False.*same packages")
