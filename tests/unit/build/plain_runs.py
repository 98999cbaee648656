"""Runs of the plain storage: every rank's optimizers hold whole parameters."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core import optimizer as megatron_optimizer
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer import OptimizerConfig, ParamKey
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.checkpoint.keys import split_key
from megatron_eopt.checkpoint.migration import Policy
from tests.harness.megatron import initialize_megatron
from tests.harness.models import synthetic_batch, tiny_gpt, train_step, wrap_ddp
from tests.unit.stores.runs import slab_of

METADATA = {"chained_optim_avoid_prefix": True}
SIZES = {"gated": True, "query_groups": 2, "position_embedding": "rope"}
STEPS = 2


@dataclass(frozen=True)
class Run:
    """A few steps of a tiny GPT.

    Attributes:
        optimizer: Name of the main optimizer.
        config: Further fields of the configuration.
        dtype: Of the model.
        parallel: Arguments of ``initialize_megatron``.
        model: Arguments of ``tiny_gpt``.
        overrides: Names of parameters to the optimizer that they are routed to.
        lr: Largest learning rate.
        stock: Whether megatron-core's own factory builds it.
        stock_config: Whether the configuration is of megatron-core's own class.
        mixed: Whether the norms' weights of a 16-bit model are float32.
    """

    optimizer: str
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    parallel: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    lr: float = 0.01
    stock: bool = False
    stock_config: bool = False
    mixed: bool = False


@dataclass
class Result:
    """Losses of the steps, and this rank's weights and states by names of the whole model."""

    losses: list[float | None]
    tensors: dict[str, tuple[Any, torch.Tensor]]


def build(run: Run, seed: int = 1) -> tuple[Any, Any]:
    """Return a wrapped model and its optimizer."""
    if not parallel_state.model_parallel_is_initialized():
        initialize_megatron(**run.parallel)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    dtype = getattr(torch, run.dtype)
    model = tiny_gpt(dtype=dtype, **({"layers": 2, **SIZES} | run.model))
    for name, param in model.named_parameters():
        if run.mixed and "norm" in name:
            param.data = param.data.float()
        if run.optimizer == "sinkhorn_muon":
            # doubly stochastic up to its shape, as this optimizer demands
            param.data.fill_(1 / min(param.shape))
    chunk = wrap_ddp(model)
    fields = {
        "optimizer": run.optimizer,
        "lr": run.lr,
        "min_lr": 0.001,
        "weight_decay": 0.1,
        "bf16": dtype == torch.bfloat16,
        **run.config,
    }
    if run.stock:
        factory: Any = megatron_optimizer.get_megatron_optimizer
        optimizer = factory(OptimizerConfig(**fields), [chunk], use_gloo_process_groups=False)
    else:
        cls = OptimizerConfig if run.stock_config else EmergingOptimizerConfig
        overrides = {ParamKey(name=n): {"optimizer": o} for n, o in run.overrides.items()}
        optimizer = get_megatron_optimizer(cls(**fields), [chunk], overrides or None)
    for group in optimizer.param_groups:
        group["lr"] = group["max_lr"]
    return chunk, optimizer


def step(chunk: Any, optimizer: Any, number: int) -> float | None:
    """Do one step; nothing random in it depends on what was done before."""
    torch.manual_seed(number)
    rank = parallel_state.get_data_parallel_rank()
    return train_step([chunk], optimizer, [synthetic_batch(1000 * rank + number)])


def unwrapped(chunk: Any) -> Any:
    """Return the model itself."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def sharded(chunk: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """Return what is saved or loaded."""
    model = unwrapped(chunk)
    # the optimizer's is made from one of its own, and neither may see what the other changes
    state = optimizer.sharded_state_dict(
        model.sharded_state_dict(metadata=dict(METADATA)),
        is_loading=is_loading,
        metadata=dict(METADATA),
    )
    return {"model": model.sharded_state_dict(metadata=dict(METADATA)), "optimizer": state}


def write(run: Run, folder: str, *, in_background: bool = False) -> Result:
    """Step, save, step on; return all losses, and what was saved."""
    chunk, optimizer = build(run)
    losses = [step(chunk, optimizer, number) for number in range(STEPS)]
    state = sharded(chunk, optimizer, is_loading=False)
    saved = {name: (slab, value.clone()) for name, (slab, value) in local(chunk, optimizer).items()}
    if in_background:
        calls = AsyncCallsQueue()
        calls.schedule_async_request(
            dist_checkpointing.save(state, folder, async_sharded_save=True, async_strategy="mcore")
        )
        losses += [step(chunk, optimizer, number) for number in range(STEPS, 2 * STEPS)]
        calls.maybe_finalize_async_calls(blocking=True)
        calls.close()
    else:
        dist_checkpointing.save(state, folder)
        losses += [step(chunk, optimizer, number) for number in range(STEPS, 2 * STEPS)]
    final = local(chunk, optimizer)
    return Result(losses, saved | {f"final {name}": value for name, value in final.items()})


def read(run: Run, folder: str, without: Collection[str] = ()) -> Result:
    """Load into another model and do the remaining steps; return losses, and what was loaded.

    Args:
        run: What to continue.
        folder: Of the checkpoint.
        without: Kinds of state that are not asked for.
    """
    chunk, optimizer = build(run, seed=2)
    load(chunk, optimizer, folder, without)
    found = {name: (slab, value.clone()) for name, (slab, value) in local(chunk, optimizer).items()}
    losses = [step(chunk, optimizer, number) for number in range(STEPS, 2 * STEPS)]
    final = local(chunk, optimizer)
    return Result(losses, found | {f"final {name}": value for name, value in final.items()})


def load(chunk: Any, optimizer: Any, folder: str, without: Collection[str] = ()) -> None:
    """Load a checkpoint as the trainer does, apart from kinds of state that are not asked for."""
    wanted = sharded(chunk, optimizer, is_loading=True)
    values = wanted["optimizer"]["param_state"]["values"] if without else {}
    for place, pieces in list(values.items()):
        if {split_key(piece.key).kind for piece in pieces.values()} & set(without):
            del values[place]
    _take(chunk, optimizer, wanted, folder)


def load_adapted(
    chunk: Any, optimizer: Any, folder: str, *, momentum_from_adam: bool = False
) -> list[str]:
    """Load what a checkpoint has; return what is said about the rest."""
    wanted = sharded(chunk, optimizer, is_loading=True)
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {
        key: tuple(item.size) if isinstance(item, TensorStorageMetadata) else None
        for key, item in metadata.items()
    }
    requests = wanted["optimizer"]["requests"].unwrap()
    notes = requests.adapt(shapes, Policy(momentum_from_adam=momentum_from_adam))
    _take(chunk, optimizer, wanted, folder)
    return notes


def _take(chunk: Any, optimizer: Any, wanted: dict[str, Any], folder: str) -> None:
    loaded = dist_checkpointing.load(wanted, folder)
    unwrapped(chunk).load_state_dict(loaded["model"], strict=False)
    optimizer.load_state_dict(loaded["optimizer"])


def local(chunk: Any, optimizer: Any) -> dict[str, tuple[Any, torch.Tensor]]:
    """Return this rank's weights, main weights and states with how they are cut.

    State in another shape than its parameter's has no cut.
    """
    model = unwrapped(chunk)
    first = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
    names = {}
    for name, param in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first)
        names[param] = ".".join(parts)
    result: dict[str, tuple[Any, torch.Tensor]] = {}
    gated = True
    for param, name in names.items():
        slab = slab_of(name, param, gated)
        result[name] = (slab, param.detach())
        main = getattr(param, "main_param", param)
        state = next(
            (o.state[main] for o in optimizer.chained_optimizers if main in o.optimizer.state), {}
        )
        values = {"main": main.detach(), **state} if main is not param else state
        for key, value in _leaves(values):
            tensor = torch.as_tensor(value)
            alike = tensor.shape == param.shape
            result[f"{name} {key}"] = (slab if alike else None, tensor.detach())
    return result


def _leaves(state: Any) -> list[tuple[str, Any]]:
    found = []
    for key, value in state.items():
        if isinstance(value, list | tuple):
            found += [(f"{key}.{i}", item) for i, item in enumerate(value)]
        else:
            found.append((key, value))
    return found
