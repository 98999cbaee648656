"""Steps with injected gradients: what a parameter's gradient is depends on its global name alone.

So runs in any parallel layout do the same work as one process, up to rounding in the optimizer.
"""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_standard_config_overrides
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_eopt.extending import LayerWiseDistributedOptimizer
from megatron_eopt.optimizers.muon import TensorParallelMuon
from tests.harness.megatron import initialize_megatron
from tests.harness.models import tiny_gpt, wrap_ddp

DENSE = {"query_groups": 2, "gated": True, "heads": 4, "bias": True}
MOE = {"query_groups": 4, "heads": 4, "experts": 4, "moe_grouped_gemm": False}
SHARED_EXPERTS = {**MOE, "gated": True, "moe_shared_expert_intermediate_size": 24}
BF16 = {"model": DENSE | {"dtype": torch.bfloat16}, "config": {"bf16": True}}
FP16 = {"fp16": True, "initial_loss_scale": 1024.0, "min_loss_scale": 1.0}
FP16 |= {"loss_scale_window": 2, "hysteresis": 1}
SHARDED, PLAIN = ({"use_distributed_optimizer": value} for value in (True, False))
REPLICATED: dict[str, Any] = {"ddp": PLAIN, "config": PLAIN}
INSTANCES: dict[str, Any] = {
    "parallel": {"optimizer_instances": 2},
    "ddp": {"num_distributed_optimizer_instances": 2},
}
"""Two instances of the distributed optimizer: each has all state, as in HSDP."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
NORMUON = {"adaptive_muon_moment2_method": "normuon"}

ZERO_EVERY = 5


@dataclass(frozen=True)
class Run:
    """One run of a few steps; the last three fields are parts of names of parameters."""

    optimizer: str = "layer_wise"  # "stock": megatron-core's plain Muon
    model: dict[str, Any] = field(default_factory=lambda: {**DENSE})  # arguments of tiny_gpt
    parallel: dict[str, Any] = field(default_factory=dict)  # of initialize_megatron
    ddp: dict[str, Any] = field(default_factory=dict)  # of DistributedDataParallelConfig
    config: dict[str, Any] = field(default_factory=dict)  # of OptimizerConfig
    steps: int = 3
    muon: str = ""  # the matrices that Muon gets
    frozen: str | None = None
    float32: str | None = None  # those of a 16-bit model that are float32


@dataclass(frozen=True)
class Slab:
    """One rank's part of a parameter: ``part`` of ``parts`` of its rows (0) or columns (1).

    Weight rematerialization takes ``piece`` of ``pieces`` of its rows, after ``padding`` rows.
    """

    dim: int
    part: int
    parts: int
    halves: int
    piece: int = 0
    pieces: int = 1
    padding: int = 0

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        if self.dim != -1:
            halves = whole.chunk(self.halves, self.dim)
            parts = [half.chunk(self.parts, self.dim)[self.part] for half in halves]
            whole = torch.cat(parts, self.dim)
        if self.pieces == 1:
            return whole
        padded = torch.nn.functional.pad(whole, (0, 0, 0, self.padding))
        return padded.chunk(self.pieces)[self.piece]

    def whole_shape(self, shape: torch.Size) -> list[int]:
        sizes = list(shape)
        if self.pieces > 1:
            sizes[0] = sizes[0] * self.pieces - self.padding
        if self.dim != -1:
            sizes[self.dim] *= self.parts
        return sizes


@dataclass
class Result:
    """What a rank saw: its weights with their places, and what each step returned."""

    weights: dict[str, tuple[Slab, torch.Tensor]]
    steps: list[tuple[bool, float | None, float | None]]
    extra: Any = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: weight for name, (_, weight) in self.weights.items()}


def slab_of(name: str, param: Any, gated: bool) -> Slab:
    cut = getattr(param, "tensor_model_parallel", False)
    # tensor parallelism cuts gate and up each by itself
    halves = 2 if gated and "linear_fc1" in name else 1
    of_expert = not getattr(param, "allreduce", True)
    slab = slab_at(param.partition_dim if cut else -1, halves, of_expert=of_expert)
    if getattr(param, "is_gtp_weight_remat", False):
        rank, size = param.group.rank(), param.group.size()
        slab = replace(slab, piece=rank, pieces=size, padding=param.pad_length)
    return slab


def slab_at(dim: int, halves: int, *, of_expert: bool) -> Slab:
    """Return the part that tensor parallelism gives this rank of a parameter that it cuts so."""
    if of_expert:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    return Slab(dim if size > 1 else -1, rank, size, halves)


def global_name(name: str, model: dict[str, Any]) -> str:
    """Count experts, and the layers of pipeline stages, over the whole model."""
    parts = name.split(".")
    while parts[0] == "module":  # wrappers of DDP and of 16-bit models
        parts = parts[1:]
    if "layers" in parts:
        at = parts.index("layers") + 1
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        stage = parallel_state.get_pipeline_model_parallel_rank()
        # an interleaved pipeline's chunks follow one another around all stages
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        in_chunk = model.get("layers", 2) // (stages * chunks)
        before = in_chunk * (stages * model.get("virtual_stage", 0) + stage)
        parts[at] = str(int(parts[at]) + before)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        local = model["experts"] // parallel_state.get_expert_model_parallel_world_size()
        first = local * parallel_state.get_expert_model_parallel_rank()
        parts[at] = str(first + int(parts[at]))
    return ".".join(parts)


def global_values(name: str, slab: Slab, shape: torch.Size, salt: int) -> torch.Tensor:
    """Return a random tensor of the unsharded shape."""
    sizes = slab.whole_shape(shape)
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + salt)
    return torch.randn(sizes, generator=generator) / math.sqrt(sizes[-1])


def make_chunk(run: Run, wrap: Callable[..., Any] = wrap_ddp) -> Any:
    """Return a wrapped model whose weights depend on their global names alone."""
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron(**run.parallel)
    model = tiny_gpt(**run.model)
    gated = run.model.get("gated", False)
    for name, param in model.named_parameters():
        if run.frozen is not None and run.frozen in name:
            param.requires_grad = False
        if run.float32 is not None and run.float32 in name:
            param.data = param.data.float()
        slab = slab_of(name, param, gated)
        whole = global_values(global_name(name, run.model), slab, param.shape, 0)
        param.data.copy_(slab.of(whole))
    return wrap(model, **({"use_distributed_optimizer": run.optimizer != "stock"} | run.ddp))


def make_config(run: Run) -> OptimizerConfig:
    fields: dict[str, Any] = {
        "optimizer": "muon",
        "lr": 0.01,
        "min_lr": 0.001,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
        "muon_momentum": 0.95,
        "muon_nesterov": True,
        "muon_fp32_matmul_prec": "highest",
        "muon_tp_mode": "duplicated",
        "log_num_zeros_in_grad": True,
    }
    return OptimizerConfig(**fields | run.config)


def param_groups(run: Run, config: Any, *chunks: Any) -> tuple[list[Any], list[Any]]:
    """Return megatron-core's groups, split into those of matrices and the others."""
    overrides = get_standard_config_overrides(config)
    matrices, others = [], []
    names = {param: name for chunk in chunks for name, param in chunk.named_parameters()}
    for group in megatron_optimizer._get_param_groups(list(chunks), config, overrides):
        mine, rest = [], []
        for param in group["params"]:
            embedding = getattr(param, "is_embedding_or_output_parameter", False)
            is_matrix = param.dim() == 2 and not embedding and run.muon in names[param]
            (mine if is_matrix else rest).append(param)
        matrices.append({**group, "params": mine, "optimizer": run.optimizer})
        others.append({**group, "params": rest, "optimizer": "adam"})
    return matrices, others


def adam_over(groups: list[Any], config: Any) -> torch.optim.AdamW:
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=betas, eps=config.adam_eps, weight_decay=config.weight_decay
    )


def muon_over(groups: list[Any], config: Any, chunk: Any, cls: Any = TensorParallelMuon) -> Any:
    model = chunk.config
    head = model.kv_channels
    queries = model.num_attention_heads // model.num_query_groups * head
    return cls(
        groups,
        lr=config.lr,
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        weight_decay=config.weight_decay,
        fp32_matmul_prec=config.muon_fp32_matmul_prec,
        tp_mode=config.muon_tp_mode,
        split_qkv=config.muon_split_qkv,
        is_qkv_fn=lambda param: bool(getattr(param, "test_is_qkv", False)),
        qkv_split_shapes=[queries, head, head],
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )


def make_optimizer(
    run: Run, *chunks: Any, config: Any = None, collection: Any = None, bases: Any = None
) -> Any:
    """Return an optimizer that steps at its configuration's rate; ``bases`` are what it wraps."""
    config = config or make_config(run)
    if run.optimizer == "stock":
        optimizer = megatron_optimizer.get_megatron_optimizer(config, list(chunks))
    else:
        for name, param in (item for chunk in chunks for item in chunk.named_parameters()):
            param.test_is_qkv = name.endswith("linear_qkv.weight")
        matrices, others = param_groups(run, config, *chunks)
        init = bases and [lambda *_: None] * len(bases)
        bases = bases or [muon_over(matrices, config, chunks[0]), adam_over(others, config)]
        optimizer = LayerWiseDistributedOptimizer(bases, config, collection, init, list(chunks))
    set_lr(optimizer, config)
    return optimizer


def inject(run: Run, chunk: Any, step: int) -> None:
    """Set gradients; where reduce-scatter would leave partial sums, leave nan."""
    gated = run.model.get("gated", False)
    values = {}
    for name, param in chunk.named_parameters():
        if param.requires_grad:
            slab = slab_of(name, param, gated)
            whole = global_values(global_name(name, run.model), slab, param.shape, 1 + step)
            # zeros to be counted
            whole.view(-1)[::ZERO_EVERY] = 0
            values[param] = slab.of(whole)
    for param, value in values.items():
        param.main_grad.copy_(value)
    if not chunk.ddp_config.use_distributed_optimizer:
        return
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        size, rank = buffer.data_parallel_group.size(), buffer.data_parallel_group.rank()
        for bucket in buffer.buckets:
            shards = bucket.grad_data.chunk(size)
            for number, shard in enumerate(shards):
                if number != rank:
                    shard.fill_(math.nan)


def gradients(run: Run, chunk: Any, optimizer: Any, step: int) -> None:
    """Set gradients of a loss that was multiplied by the optimizer's scale."""
    optimizer.zero_grad()
    inject(run, chunk, step)
    for buffer in chunk.buffers + chunk.expert_parallel_buffers:
        buffer.grad_data.mul_(float(optimizer.get_loss_scale()))


def weights(run: Run, chunk: Any) -> dict[str, tuple[Slab, torch.Tensor]]:
    gated = run.model.get("gated", False)
    return {
        global_name(name, run.model): (slab_of(name, param, gated), param.detach().clone())
        for name, param in chunk.named_parameters()
    }


def set_lr(optimizer: Any, config: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = config.lr


def set_rates(optimizer: Any, config: Any) -> None:
    """Set learning rates and weight decay, as Megatron's scheduler would."""
    for group in optimizer.param_groups:
        group |= {"lr": config.lr, "weight_decay": config.weight_decay * group["wd_mult"]}


def train(run: Run, **kwargs: Any) -> Result:
    """Build, with arguments of ``make_optimizer``, step, and return this rank's weights."""
    chunk = make_chunk(run)
    optimizer = make_optimizer(run, chunk, **kwargs)
    steps = []
    for step in range(run.steps):
        gradients(run, chunk, optimizer, step)
        steps.append(optimizer.step())
    if chunk.ddp_config.overlap_param_gather:
        # a gather that waits for a forward pass
        chunk.disable_forward_pre_hook()
    return Result(weights(run, chunk), steps)


def check_steps(results: list[Result], expected: Result, *, has_copies: bool = False) -> None:
    """Compare norms and counts of zeros; megatron-core counts tensor-parallel copies, too."""
    for result in results:
        pairs = zip(result.steps, expected.steps, strict=True)
        for (done, norm, zeros), (_, expected_norm, expected_zeros) in pairs:
            assert done
            # sums of squares in another order
            assert math.isclose(norm, expected_norm, rel_tol=1e-6)
            assert zeros == expected_zeros > 1000 or has_copies


def deviation(results: list[Result], reference: Result) -> float:
    """Return the largest relative deviation of a weight from one process's."""
    worst = 0.0
    for result in results:
        for name, (slab, weight) in result.weights.items():
            expected = slab.of(reference.weights[name][1])
            # a rank may hold nothing but padding rows, which are zero
            far = float((weight - expected).norm() / expected.norm().clamp(min=1e-30))
            # no comparison is true of nan
            worst = max(worst, math.inf if math.isnan(far) else far)
    return worst
