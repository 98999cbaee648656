"""Several optimizers may share a model, each built while the others' parameters are frozen."""

from megatron_eopt.fsdp2 import build_optimizer
from tests.unit.fsdp2.model import config, eager, make_model, named, set_gradients


@eager
def test_what_another_optimizer_updates_is_not_said_to_be_lost(caplog):
    model = make_model()
    optimizers = []
    for is_mine in (
        lambda name: name == "up.bias",
        lambda name: name not in ("up.bias", "tiny.weight"),
    ):
        for name, param in named(model).items():
            param.requires_grad_(is_mine(name))
        optimizers.append(build_optimizer(model, config()))
    for param in named(model).values():
        param.requires_grad_(True)
    set_gradients(model, 0)
    for optimizer in optimizers:
        optimizer.step()
    texts = [r.getMessage() for r in caplog.records if "frozen when" in r.getMessage()]
    assert texts
    assert all(text.startswith("tiny.weight:") for text in texts)
