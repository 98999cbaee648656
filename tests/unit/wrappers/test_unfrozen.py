"""A parameter that is unfrozen after the build is named once, at the next step."""

from typing import Any

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt import EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from tests.harness import run_ranks
from tests.harness.log import listening
from tests.unit.fsdp2.model import eager, set_gradients
from tests.unit.storage.foreign import FIELDS, STORAGES, Foreign, built, inject, wrapped

OWN_LOOPS = ("plain", "fully_shard")


@eager
def said(storage: str) -> list[list[str]]:
    """Return what each of four steps logs; the weights are unfrozen before the second one."""
    model = Foreign()
    model.hidden.requires_grad_(False)
    if storage in OWN_LOOPS:
        if storage == "fully_shard":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        chunk: Any = model
        optimizer = build_optimizer(model, EmergingOptimizerConfig(**FIELDS), output_layers=())
    else:
        chunk = wrapped(storage, model)
        optimizer = built(storage, chunk)
    found = []
    for step in range(4):
        if step == 1:
            model.hidden.weight.requires_grad_(True)
        if storage in OWN_LOOPS:
            set_gradients(model, step)
        else:
            frozen = [p for p in model.hidden.parameters() if not hasattr(p, "main_grad")]
            for param in frozen:
                param.main_grad = param.detach().clone()
            inject(storage, chunk, step)
        with listening() as lines:
            optimizer.step()
        found.append([text for text in lines if "frozen when the optimizer was built" in text])
    return found


@pytest.mark.parametrize("storage", [*OWN_LOOPS, *STORAGES])
def test_it_is_named_once(storage):
    for quiet, named, *later in run_ranks(2, said, storage, cpu=storage in STORAGES):
        assert (quiet, later) == ([], [[], []])
        (text,) = named
        assert "hidden.weight" in text
        assert "hidden.bias" not in text
        assert "Build the optimizer again" in text
