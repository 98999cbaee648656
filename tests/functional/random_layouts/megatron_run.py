"""A draw in Megatron's loop: the distributed optimizer, or copies."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor, nn

from megatron_eopt import checkpoints, get_megatron_optimizer
from tests.functional.random_layouts.draws import Draw, Layout, Parameter, parameters, values
from tests.functional.random_layouts.judge import config_of
from tests.functional.random_layouts.models import Run, Weights, mark, modules
from tests.harness.megatron import initialize_megatron
from tests.harness.models import wrap_ddp
from tests.unit.storage.runs import Slab, slab_at

BUCKETS: dict[str, dict[str, Any]] = {
    "small": {"overlap_grad_reduce": True, "bucket_size": 1000},
    "padded": {"pad_buckets_for_high_nccl_busbw": True},
}
"""Fields of DDP's configuration."""


class MegatronRun(Run):
    """In Megatron's loop."""

    def __init__(self, draw: Draw, layout: Layout) -> None:
        super().__init__(draw, layout)
        is_sharded = layout.storage == "zero1"
        instances = layout.replicas
        initialize_megatron(layout.tp, ep=layout.ep, etp=layout.etp, optimizer_instances=instances)
        self.slabs: dict[str, Slab] = {}
        self.model = self._model()
        self.chunk = wrap_ddp(
            self.model,
            use_distributed_optimizer=is_sharded and layout.buckets != "copied",
            num_distributed_optimizer_instances=instances,
            **BUCKETS.get(layout.buckets, {}),
        )
        config = config_of(draw, use_distributed_optimizer=is_sharded)
        self.chain = get_megatron_optimizer(config, [self.chunk])
        self._schedule()

    def _model(self) -> nn.Module:
        expert_ranks = parallel_state.get_expert_model_parallel_world_size()
        expert_rank = parallel_state.get_expert_model_parallel_rank()
        count = sum(param.expert is not None for param in parameters(self.draw)) // expert_ranks
        mine = range(expert_rank * count, (expert_rank + 1) * count)
        self.params, local = {}, {}
        for param in parameters(self.draw):
            if param.expert is not None and param.expert not in mine:
                continue
            slab = slab_at(param.cut, param.halves, of_expert=param.expert is not None)
            self.slabs[param.name] = slab
            tensor = nn.Parameter(slab.of(values(self.draw, param)).clone())
            mark(tensor, param, self.draw)
            self.params[param.name] = param, tensor
            index = "" if param.expert is None else str(param.expert - mine[0])
            local[param.name.replace(f"experts.{param.expert}.", f"experts.{index}.")] = tensor
        model: Any = modules(local)
        model.moe.local_expert_indices = list(mine)
        half = self.draw.dtype == "bfloat16"
        model.config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            add_bias_linear=False,
            num_moe_experts=count * expert_ranks,
            bf16=half,
            params_dtype=torch.bfloat16 if half else torch.float32,
            tensor_model_parallel_size=self.layout.tp,
            expert_model_parallel_size=self.layout.ep,
            expert_tensor_parallel_size=self.layout.etp,
            gradient_accumulation_fusion=False,
        )
        return model.bfloat16() if half else model  # type: ignore[no-any-return]

    def _schedule(self) -> None:
        """Set the rates, as a scheduler does."""
        for group in self.chain.param_groups:
            group["lr"] = self.chain.config.lr
            group["weight_decay"] = self.chain.config.weight_decay * group["wd_mult"]

    def part(self, name: str, full: Tensor) -> Tensor:
        return self.slabs[name].of(full)

    def set_gradients(self, step: int) -> None:
        """Set gradients; where reduce-scatter would leave partial sums, leave nan."""
        self.chain.zero_grad()
        for name, (param, tensor) in self.params.items():
            if tensor.requires_grad:
                tensor.main_grad.copy_(self.part(name, values(self.draw, param, step)))
        if not self.chunk.ddp_config.use_distributed_optimizer:
            return
        for buffer in self.chunk.buffers + self.chunk.expert_parallel_buffers:
            size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
            for bucket in buffer.buckets:
                for number, piece in enumerate(bucket.grad_data.chunk(size)):
                    if number != rank:
                        piece.fill_(math.nan)

    def step(self) -> float | None:
        return float(self.chain.step()[1])

    def mains(self, expected: Weights) -> Iterator[tuple[str, Tensor, Tensor]]:
        names = {tensor: name for name, (_, tensor) in self.params.items()}
        for storage in self.chain.chained_optimizers:
            for item in storage.shards:
                name = names[item.param]
                want = item.held_of(self.part(name, expected[name]).contiguous())
                yield name, item.main.reshape(-1), want.reshape(-1)

    def _state(self, *, is_loading: bool) -> dict[str, Any]:
        model, its = (
            {name: self._saved(*pair) for name, pair in self.params.items()} for _ in range(2)
        )
        how = {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
        }
        state = self.chain.sharded_state_dict(its, is_loading=is_loading, metadata=how)
        return {"model": model, "optimizer": state}

    def _saved(self, param: Parameter, tensor: Tensor) -> Any:
        slab = self.slabs[param.name]
        cuts = [(slab.dim, slab.part, slab.parts)] if slab.dim != -1 else []
        if param.expert is None:
            data = parallel_state.get_data_parallel_rank()
        else:
            data = parallel_state.get_expert_data_parallel_rank()
        replica = 0, 0 if cuts else slab.part, data
        saved = ShardedTensor.from_rank_offsets(param.name, tensor, *cuts, replica_id=replica)
        return apply_swiglu_sharded_factory(saved, ()) if param.halves == 2 else saved

    def save(self, folder: Path) -> None:
        dist_checkpointing.save(self._state(is_loading=False), str(folder))

    def load(self, folder: Path) -> None:
        loaded: Any = checkpoints.load(self._state(is_loading=True), str(folder))
        with torch.no_grad():
            for name, (_, tensor) in self.params.items():
                tensor.copy_(loaded["model"][name])
        self.chain.load_state_dict(loaded["optimizer"])
