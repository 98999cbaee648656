"""Every registered optimizer trains; names, entries and packages' entry points."""

from types import SimpleNamespace

import pytest
import torch
from emerging_optimizers import registry as emerging_registry
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt import ConfigurationError, EmergingOptimizerEntry, get_megatron_optimizer
from megatron_eopt.config import registry
from megatron_eopt.config.registry import optimizer_names
from megatron_eopt.optimizers.scalar import scalar_init_of
from tests.harness.each_rank import on_ranks
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp

# These keep every row (or column) of a weight at unit length and say that it must start there.
ON_A_SPHERE = {"oblique_sgd", "oblique_adam"}


@on_ranks(1, timeout=120)
def test_every_optimizer_trains() -> None:
    registered = set(emerging_registry.get_optimizer_name_list()) - {"adaptive_muon"}
    assert registered <= set(optimizer_names())
    initialize_megatron()
    for name in optimizer_names():
        torch.manual_seed(1)
        chunk = wrap_ddp(tiny_gpt(layers=1))
        config = OptimizerConfig(optimizer=name, lr=1e-3, min_lr=1e-3, clip_grad=1.0)
        if name in ON_A_SPHERE:
            for param in chunk.parameters():
                if param.dim() == 2:
                    param.data = torch.nn.functional.normalize(param.data, dim=0)
        if name == "sinkhorn_muon":  # keeps weights non-negative with equal sums
            from emerging_optimizers.utils import SinkhornMapper

            for param in chunk.parameters():
                if param.dim() == 2:
                    param.data = SinkhornMapper(num_iters=50)(param.data.abs())
        optimizer = get_megatron_optimizer(config, [chunk])
        assert optimizer.chained_optimizers[0].optimizer.param_groups[0]["optimizer"] == name
        losses = [train_step([chunk], optimizer, [synthetic_batch(0)]) for _ in range(5)]
        assert losses[-1] < losses[0], name


def test_entry_points_of_installed_packages_are_loaded(monkeypatch, caplog):
    class Theirs(torch.optim.SGD):
        pass

    def point(name, load):
        return SimpleNamespace(name=name, value=f"theirs:{load.__name__}", load=load)

    def entry():
        return EmergingOptimizerEntry(Theirs)

    def broken():
        raise ModuleNotFoundError("No module named 'absent'")

    kinds = {"theirs": entry, "broken": broken, "odd": object, "also": entry}
    points = [point(name, load) for name, load in kinds.items()]
    registry.entries()
    monkeypatch.setattr(registry, "_entries", dict(registry.entries()))

    assert registry.ENTRY_POINTS == "megatron_eopt.optimizers"
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    for name in ("theirs", "also", "theirs"):
        assert registry.entry_of(name).optimizer_cls is Theirs
    with pytest.raises(ConfigurationError, match="broken"):
        registry.entry_of("broken")
    first, second = (record.getMessage() for record in caplog.records)
    for word in ("'broken'", "'theirs:broken'", "No module named 'absent'"):
        assert word in first
    assert "'odd'" in second
    assert "ConfigurationTypeError" in second


def test_a_class_that_is_not_installed_is_named_as_the_user_wrote_it():
    with (
        registry.registered("theirs", registry.LateEntry("no_such_package.optimizers.Theirs")),
        pytest.raises(ConfigurationError, match=r"optimizer='theirs'.*Install no-such-package"),
    ):
        registry.arguments_cls_of("theirs")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_sgd_begins_with_a_momentum_if_it_has_one(momentum):
    cls = type("FusedSGD", (torch.optim.SGD,), {"__module__": "apex.optimizers"})
    optimizer = cls([param := torch.ones(2)], momentum=momentum)
    scalar_init_of(optimizer)(optimizer)
    assert ("momentum_buffer" in optimizer.state[param]) == bool(momentum)
