"""What a configuration says a few steps do, in float64 and in plain terms, and what they do.

Nothing of the package is used here except the names and defaults of the fields.
"""

import math
import zlib
from typing import Any, ClassVar

import numpy as np
import torch
from emerging_optimizers.soap import SOAP
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from torch import nn

from megatron_eopt import EmergingOptimizerConfig, get_megatron_optimizer
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.testing.scene import forget_megatron
from tests.harness.megatron import initialize_megatron
from tests.harness.models import wrap_ddp
from tests.reference.adaptive_muon import AdaptiveReference
from tests.reference.muon import Matrix, newton_schulz
from tests.unit.fsdp2.models import eager
from tests.unit.routing import modules

STEPS = 3
SIZES = (1.0, 4.0, 0.3)
"""Of the gradients of each step, so that clipping changes the mix of them in the momentum."""

type Weights = dict[str, Matrix]


class Parts(nn.Module):
    """A part for each rule of a configuration; nothing that can be run."""

    def __init__(self) -> None:
        super().__init__()
        silu = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
        self.config = modules.config(num_moe_experts=3, moe_router_topk=2, **silu)
        self.embedding = nn.Embedding(5, 6)
        # as megatron-core marks its own
        self.embedding.weight.is_embedding_or_output_parameter = True  # type: ignore[assignment]
        self.attention = modules.attention(modules.config())
        self.mlp = modules.mlp(modules.config(**silu))
        self.latent = modules.mla(modules.mla_config())
        self.delta = modules.gated_delta_net()
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.router = TopKRouter(self.config, groups)
        self.conv = nn.Conv2d(3, 4, 2)
        self.excluded = nn.Linear(7, 5)
        self.excluded.weight.use_muon = False  # type: ignore[assignment]
        self.q_layernorm = nn.LayerNorm(6)
        for name, param in self.named_parameters():
            param.data.copy_(random_values(name, param.shape))


def random_values(name: str, shape: torch.Size, step: int = -1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator) * (0.3 if step < 0 else SIZES[step])


MATRICES = (
    *("attention.linear_qkv.weight", "attention.linear_proj.weight"),
    *("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"),
    *(f"latent.linear_{n}.weight" for n in ("q_down_proj", "q_up_proj", "proj")),
    *(f"latent.linear_{n}.weight" for n in ("kv_down_proj", "kv_up_proj")),
    *("delta.in_proj.weight", "delta.out_proj.weight"),
)
DELTA = [(6, 3), (6, 3), (20, 5), (20, 5), (4, 4), (4, 4)]
FUSED = {
    "attention.linear_qkv.weight": ("qkv", 2, [(12, 6), (6, 6), (6, 6)]),
    "mlp.linear_fc1.weight": ("gated", 1, [(20, 20), (20, 20)]),
    "latent.linear_q_up_proj.weight": ("mla", 4, [(6, 6), (2, 2)]),
    "latent.linear_kv_down_proj.weight": ("mla", 1, [(6, 6), (2, 2)]),
    "latent.linear_kv_up_proj.weight": ("mla", 4, [(6, 6), (4, 4)]),
    "delta.in_proj.weight": ("linear_attention", 1, DELTA),
}
"""Kind of a fused weight, blocks, and for each part of a block its rows and those of a head."""


def scale_of(config: Any, rows: int, cols: int) -> float:
    factors = {
        "spectral": max(rows, cols) ** 0.5,
        "unit_rms_norm": (rows / cols) ** 0.5,
        "shape_scaling": max(1, rows / cols) ** 0.5,
        "adamw_rms": 0.2 * max(rows, cols) ** 0.5,
    }
    return factors[config.muon_scale_mode] * config.muon_extra_scale_factor


def norm_of(grads: Weights) -> float:
    return math.sqrt(sum(float((grad**2).sum()) for grad in grads.values()))


class ByHand:
    """Steps all weights as the fields say, for a storage."""

    of_soap: ClassVar[dict[str, Any]] = {}
    """Arguments of SOAP that no fields give."""

    def __init__(self, storage: str, fields: dict[str, Any], weights: Weights) -> None:
        self.config: Any = EmergingOptimizerConfig(**fields)
        self.storage = storage
        self.weights = {name: weight.astype(np.float64) for name, weight in weights.items()}
        self.state: dict[str, Any] = {name: {} for name in weights}

    def is_main(self, name: str) -> bool:
        """Whether the optimizer that the configuration names steps a weight."""
        config = self.config
        if config.optimizer in ("adam", "sgd"):
            return True
        by_muon = config.optimizer in ("muon", "adaptive_muon")
        return (
            name in MATRICES
            or (name == "router.weight" and (config.muon_orthogonalize_router or not by_muon))
            or (name == "excluded.weight" and config.muon_ignore_use_muon and by_muon)
            or (name == "conv.weight" and config.muon_convolutions and by_muon)
        )

    def parts(self, name: str, rows: int) -> list[np.ndarray]:
        """Return the rows of each logical matrix of a weight."""
        kind, blocks, fields = FUSED.get(name, ("", 1, []))
        if not getattr(self.config, f"muon_split_{kind}", False):
            return [np.arange(rows)]
        found: list[np.ndarray] = []
        start = 0
        for count, head in fields:
            mine = np.arange(rows).reshape(blocks, -1)[:, start : start + count].reshape(-1)
            found.extend(mine.reshape(-1, head) if self.config.muon_split_per_head else [mine])
            start += count
        return found

    def rate(self, name: str, step: int) -> float:
        config = self.config
        most, least = config.lr, config.min_lr
        if self.is_main(name) and config.optimizer in ("muon", "adaptive_muon"):
            most = most if config.muon_lr is None else config.muon_lr
            least = least if config.muon_min_lr is None else config.muon_min_lr
        if name.startswith("embedding"):
            most = most if config.decoupled_lr is None else config.decoupled_lr
            least = least if config.decoupled_min_lr is None else config.decoupled_min_lr
        # your own loop has no scheduler here; Megatron's falls to the lowest rate in all steps
        return most if self.storage == "own loop" else most - (most - least) * step / STEPS

    def decay(self, name: str) -> float:
        decays_too = self.config.apply_wd_to_qk_layernorm and name.startswith("q_layernorm.")
        decay, own = self.config.weight_decay, self.config.muon_weight_decay
        if own is not None and self.is_main(name) and "muon" in self.config.optimizer:
            decay = own
        return 0.0 if self.weights[name].ndim == 1 and not decays_too else decay

    def step(self, step: int, gradients: Weights) -> None:
        config = self.config
        grads = {name: grad.astype(np.float64) for name, grad in gradients.items()}
        norm = norm_of(grads)
        factor = min(1.0, config.clip_grad / norm) if config.clip_grad else 1.0
        if norm > config.grad_norm_skip_threshold:
            return
        for name, grad in grads.items():
            is_main = self.is_main(name)
            if not (is_main and config.muon_skip_grad_clip):
                grad = grad * factor
            optimizer = config.optimizer if is_main else config.muon_scalar_optimizer
            method = getattr(self, f"_{optimizer.removeprefix('adaptive_')}")
            method(name, grad, self.rate(name, step), self.decay(name))

    def _decayed(self, name: str, grad: Matrix, decay: float) -> Matrix:
        """Return the gradient, with weight decay in it unless that is decoupled."""
        is_l2 = not self.config.decoupled_weight_decay
        return grad + decay * self.weights[name] if is_l2 else grad

    def _move(self, name: str, update: Matrix, lr: float, decay: float) -> None:
        """Change a weight by an update, and by weight decay if that is decoupled."""
        config, weight = self.config, self.weights[name]
        where = update * weight >= 0 if config.cautious_weight_decay else 1.0
        decayed = lr * decay * where * weight if config.decoupled_weight_decay else 0.0
        self.weights[name] = weight - decayed - lr * update

    def _adam(self, name: str, grad: Matrix, lr: float, decay: float) -> None:
        config, state = self.config, self.state[name]
        grad = self._decayed(name, grad, decay)
        state["t"] = state.get("t", 0) + 1
        b1, b2 = config.adam_beta1, config.adam_beta2
        state["m"] = b1 * state.get("m", 0) + (1 - b1) * grad
        state["v"] = b2 * state.get("v", 0) + (1 - b2) * grad**2
        m, v = state["m"] / (1 - b1 ** state["t"]), state["v"] / (1 - b2 ** state["t"])
        self._move(name, m / (np.sqrt(v) + config.adam_eps), lr, decay)

    def _sgd(self, name: str, grad: Matrix, lr: float, decay: float) -> None:
        state = self.state[name]
        grad = grad + decay * self.weights[name]  # it has no other kind
        state["sum"] = self.config.sgd_momentum * state["sum"] + grad if state else grad
        self.weights[name] = self.weights[name] - lr * state["sum"]

    def _lion(self, name: str, grad: Matrix, lr: float, decay: float) -> None:
        config, state = self.config, self.state[name]
        grad = self._decayed(name, grad, decay)
        mean = state.get("mean", 0 * grad)
        update = np.sign(config.lion_beta1 * mean + (1 - config.lion_beta1) * grad)
        state["mean"] = config.lion_beta2 * mean + (1 - config.lion_beta2) * grad
        self._move(name, update, lr, decay)

    def _muon(self, name: str, grad: Matrix, lr: float, decay: float) -> None:
        config, state = self.config, self.state[name]
        plain, grad = grad, self._decayed(name, grad, decay)
        momentum = config.muon_momentum
        state["mean"] = momentum * state.get("mean", 0) + (1 - momentum) * grad
        direction = state["mean"]
        if config.muon_nesterov:
            direction = momentum * state["mean"] + (1 - momentum) * grad
        flat = (len(direction), -1)
        direction, plain = direction.reshape(flat), plain.reshape(flat)
        update = np.zeros_like(direction)
        for number, rows in enumerate(self.parts(name, len(direction))):
            if config.optimizer == "muon":
                steps, coefficients = config.muon_num_ns_steps, config.muon_coefficient_type
                orthogonal = newton_schulz(direction[rows], steps, coefficients)
            else:
                orthogonal = self._adapted(name, number, plain[rows], direction[rows])
            update[rows] = orthogonal * scale_of(config, *orthogonal.shape)
        self._move(name, update.reshape(grad.shape), lr, decay)

    def _adapted(self, name: str, number: int, grad: Matrix, direction: Matrix) -> Matrix:
        config, state = self.config, self.state[name]
        if number not in state:
            state[number] = AdaptiveReference(
                np.zeros((1, 1)),
                config.adaptive_muon_moment2_method,
                beta2=config.adaptive_muon_beta2,
                eps=config.adaptive_muon_eps,
                bias_correction=config.adaptive_muon_bias_correction,
            )
        state[number].steps += 1
        return state[number]._normalized(0, grad, direction)

    def _soap(self, name: str, grad: Matrix, lr: float, decay: float) -> None:
        """Each matrix by emerging-optimizers' class; without owners, fused weights are one."""
        config, state, weight = self.config, self.state[name], self.weights[name]
        betas = config.adam_beta1, config.adam_beta2
        own = {"use_kl_shampoo": config.soap_use_kl_shampoo, **self.of_soap}
        whole = [np.arange(len(grad))]
        for rows in whole if self.storage == "replicated" else self.parts(name, len(grad)):
            key = int(rows[0])
            if key not in state:
                param = nn.Parameter(torch.tensor(weight[rows], dtype=torch.float32))
                soap = SOAP([param], lr, betas, config.soap_shampoo_beta, weight_decay=decay, **own)
                state[key] = param, soap
            param, soap = state[key]
            soap.param_groups[0]["lr"] = lr
            param.grad = torch.tensor(grad[rows], dtype=torch.float32)
            soap.step()
            weight[rows] = param.detach().double().numpy()


def by_hand(storage: str, fields: dict[str, Any]) -> Weights:
    """Return the weights that the fields promise after all steps."""
    model = Parts()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    run = ByHand(storage, fields, {n: p.detach().numpy() for n, p in model.named_parameters()})
    for step in range(STEPS):
        run.step(step, {n: random_values(n, shape, step).numpy() for n, shape in shapes.items()})
    return run.weights


def stepped(storage: str, fields: dict[str, Any]) -> Weights:
    """Return the weights after all steps of the optimizer that is built."""
    model: Any = Parts()
    names = {param: name for name, param in model.named_parameters()}
    scheduler = None
    if storage == "own loop":
        optimizer: Any = build_optimizer(model, EmergingOptimizerConfig(**fields))
    else:
        flag = {"use_distributed_optimizer": storage == "sharded"}
        chunk = wrap_ddp(model, **flag)
        optimizer = get_megatron_optimizer(EmergingOptimizerConfig(**fields | flag), [chunk])
        wd = optimizer.config.weight_decay
        scheduler = OptimizerParamScheduler(
            *(optimizer, 0.0, optimizer.config.lr, optimizer.config.min_lr, 0, STEPS, "linear"),
            *(wd, wd, STEPS, "constant"),
        )
    for step in range(STEPS):
        optimizer.zero_grad()
        for param, name in names.items():
            grad = random_values(name, param.shape, step)
            if scheduler is None:
                param.grad = grad
            else:
                param.main_grad.copy_(grad * (optimizer.config.loss_scale or 1.0))
        optimizer.step()
        if scheduler is not None:
            scheduler.step(1)
    return {name: param.detach().double().numpy().copy() for param, name in names.items()}


@eager
def compared(storage: str, runs: list[dict[str, Any]]) -> list[tuple[Weights, Weights]]:
    """Return, for each configuration, what is promised and what happens."""
    initialize_megatron()
    results = [(by_hand(storage, fields), stepped(storage, fields)) for fields in runs]
    forget_megatron()
    return results
