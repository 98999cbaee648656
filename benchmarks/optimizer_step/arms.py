"""The contestants: models of megatron-core with the optimizers of each package."""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.utils import get_model_config

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from tests.harness.models import tiny_gpt, wrap_ddp

LAYERS, HIDDEN, HEADS, VOCABULARY = 4, 512, 8, 1024
EXPERTS = 8

type StorageT = Literal["whole", "fragments", "padded"]


@dataclass(frozen=True)
class Arm:
    """One contestant."""

    name: str  # in tables
    factory: Literal["megatron-core", "megatron-eopt"]  # whose ``get_megatron_optimizer``
    # class of its configuration; with megatron-core's class, this package computes megatron-core's
    # iteration bit by bit, with its own class the fastest iteration of equal accuracy
    config: type[OptimizerConfig]
    tp_mode: str  # its ``muon_tp_mode``
    # "whole": a full copy on every rank; "fragments": the distributed optimizer; "padded":
    # megatron-core's layer-wise optimizer with its padded layout
    storage: StorageT = "whole"
    optimizer: str = "muon"  # or "adam"
    backend: str | None = None  # ``muon_backend`` of this package; None for the default

    def optimizer_of(self, chunk: Any, **fields: Any) -> Any:
        """Build the optimizer of a wrapped model; ``fields`` go to the configuration."""
        if self.backend is not None:
            fields["muon_backend"] = self.backend
        config = self.config(
            optimizer=self.optimizer,
            use_distributed_optimizer=self.storage == "fragments",
            use_layer_wise_distributed_optimizer=self.storage == "padded",
            muon_tp_mode=self.tp_mode,
            **fields,
        )
        factory: Any = get_megatron_optimizer
        if self.factory == STOCK:
            factory = megatron_optimizer.get_megatron_optimizer
        return factory(config, [chunk])


@dataclass(frozen=True)
class Section:
    """Contestants that share a parallel layout."""

    name: str  # in tables
    tp: int  # tensor-parallel size
    ranks: int  # processes
    arms: tuple[Arm, ...]  # the first is ours
    experts: int | None = None  # experts per layer; None for a dense model


OURS: Literal["megatron-eopt"] = "megatron-eopt"
STOCK: Literal["megatron-core"] = "megatron-core"

SECTIONS = (
    Section(
        "TP 2",
        tp=2,
        ranks=2,
        arms=(
            Arm("ours, auto", OURS, EmergingOptimizerConfig, "auto"),
            Arm("ours, auto, stock's iteration", OURS, OptimizerConfig, "auto"),
            Arm("stock, duplicated", STOCK, OptimizerConfig, "duplicated"),
            Arm("stock, distributed", STOCK, OptimizerConfig, "distributed"),
        ),
    ),
    Section(
        "DP 2",
        tp=1,
        ranks=2,
        arms=(
            Arm("ours, fragments", OURS, EmergingOptimizerConfig, "auto", "fragments"),
            Arm("ours, stock's iteration", OURS, OptimizerConfig, "auto", "fragments"),
            Arm("stock, padded layer-wise", STOCK, OptimizerConfig, "duplicated", "padded"),
            Arm("stock, plain", STOCK, OptimizerConfig, "duplicated"),
        ),
    ),
    Section(
        "TP 2 x DP 2",
        tp=2,
        ranks=4,
        arms=(
            Arm("ours, auto", OURS, EmergingOptimizerConfig, "auto", "fragments"),
            Arm("stock, padded, duplicated", STOCK, OptimizerConfig, "duplicated", "padded"),
            Arm("stock, padded, distributed", STOCK, OptimizerConfig, "distributed", "padded"),
        ),
    ),
    Section(
        "MoE, DP 2",
        tp=1,
        ranks=2,
        arms=(
            Arm("ours, fragments", OURS, EmergingOptimizerConfig, "auto", "fragments"),
            Arm("stock, padded layer-wise", STOCK, OptimizerConfig, "duplicated", "padded"),
            Arm("stock, plain", STOCK, OptimizerConfig, "duplicated"),
        ),
        experts=EXPERTS,
    ),
)


class Contestant:
    """A model and its optimizer; all contestants start from the same weights."""

    def __init__(self, section: Section, arm: Arm) -> None:
        model_parallel_cuda_manual_seed(1234)
        torch.manual_seed(1234)
        self.arm = arm
        model = tiny_gpt(
            layers=LAYERS,
            hidden=HIDDEN,
            heads=HEADS,
            experts=section.experts,
            vocabulary=VOCABULARY,
            # megatron-core trains learned position embeddings with Muon, this package with Adam
            position_embedding="rope",
            dtype=torch.bfloat16,
        )
        self.model = wrapped_for(arm.storage, model)
        self.optimizer = arm.optimizer_of(
            self.model,
            lr=1e-2,
            weight_decay=0.01,
            bf16=True,
            params_dtype=torch.bfloat16,
            muon_nesterov=True,
            muon_momentum=0.95,
            muon_split_qkv=True,
            muon_fp32_matmul_prec="medium",
        )

    def set_gradients(self, seed: int) -> None:
        """Set gradients, the same in every contestant: noise and a rank-8 signal."""
        generator = torch.Generator().manual_seed(seed)
        for param in self.model.parameters():
            grad = param.main_grad
            grad.normal_(generator=generator)
            if grad.dim() == 2:
                left = torch.randn(grad.shape[0], 8, generator=generator)
                right = torch.randn(8, grad.shape[1], generator=generator)
                grad.addmm_(left, right, alpha=0.1)

    def weights(self) -> list[torch.Tensor]:
        """Return float32 copies of the model's weights."""
        return [param.detach().float().clone() for param in self.model.parameters()]


def wrapped_for(storage: StorageT, model: torch.nn.Module) -> Any:
    """Wrap a model by megatron-core's DDP, with the buffers that a storage needs."""
    if storage != "padded":
        return wrap_ddp(model, use_distributed_optimizer=storage == "fragments")
    # imported late, since it is slow and only this contestant needs it
    from megatron.training.training import wrap_model_chunks_with_ddp

    (wrapped,) = wrap_model_chunks_with_ddp(
        [model],
        get_model_config(model),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True),
        use_layer_wise_distributed_optimizer=True,
    )
    return wrapped
