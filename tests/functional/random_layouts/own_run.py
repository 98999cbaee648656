"""A draw in an own loop: FSDP2, or torch's DDP."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as torch_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

from megatron_eopt.fsdp2 import build_optimizer
from tests.functional.random_layouts.draws import Draw, Layout, parameters, values
from tests.functional.random_layouts.judge import config_of
from tests.functional.random_layouts.models import Run, mark, modules
from tests.unit.fsdp2.models import by_torch, load, shard


class OwnRun(Run):
    """In an own loop."""

    def __init__(self, draw: Draw, layout: Layout) -> None:
        super().__init__(draw, layout)
        whole = {param.name: param for param in parameters(draw)}
        self.dtype = getattr(torch, draw.dtype)
        tensors = {
            name: nn.Parameter(values(draw, param).to(self.dtype)) for name, param in whole.items()
        }
        for name, tensor in tensors.items():
            mark(tensor, whole[name], draw)
        self.model = modules(tensors)
        if layout.storage == "fsdp2":
            self._shard()
        self.params = {name: (whole[name], p) for name, p in self.model.named_parameters()}
        is_copied = layout.storage == "plain" and layout.ranks > 1
        self.trained = DistributedDataParallel(self.model) if is_copied else self.model
        self.optimizer = build_optimizer(self.trained, config_of(draw, bf16=False))

    def _shard(self) -> None:
        ranks, replicas = self.layout.ranks, self.layout.replicas
        shape, names = ((ranks,), ("shard",))
        if replicas > 1:
            shape, names = (replicas, ranks // replicas), ("replicate", "shard")
        mesh: Any = init_device_mesh("cpu", shape, mesh_dim_names=names)

        def placement(param: nn.Parameter) -> Shard:
            # some by columns, which must divide evenly
            columns = param.dim() == 2 and param.shape[1] % shape[-1] == 0
            return Shard(int(columns and sum(param.shape) % 2))

        for module in (self.model.get_submodule("twins"), self.model):
            fully_shard(module, mesh=mesh, shard_placement_fn=placement)

    def part(self, name: str, full: Tensor) -> Tensor:
        return getattr(part := self._like(name, full), "_local_tensor", part)

    def _like(self, name: str, full: Tensor) -> Tensor:
        return shard(full, self.params[name][1])

    def set_gradients(self, step: int) -> None:
        for name, (param, tensor) in self.params.items():
            is_given = tensor.requires_grad and name not in self.draw.without_gradient[step]
            grad = values(self.draw, param, step).to(self.dtype)
            tensor.grad = self._like(name, grad) if is_given else None

    def step(self) -> float | None:
        self.optimizer.step()
        return None

    def _state(self) -> dict[str, Any]:
        weights = {name: tensor.detach() for name, (_, tensor) in self.params.items()}
        return {"model": weights, "optimizer": by_torch(self.trained, self.optimizer)}

    def save(self, folder: Path) -> None:
        torch_checkpoint.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        # weights are loaded in place
        torch_checkpoint.load(state, checkpoint_id=folder)
        load(by_torch, self.trained, self.optimizer, state["optimizer"])
