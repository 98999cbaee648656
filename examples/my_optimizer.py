"""An optimizer in 30 lines: the sign of the momentum, times the matrix's root mean square."""

import torch

from megatron_eopt import register_optimizer


@register_optimizer("sign_per_matrix")
class SignPerMatrix(torch.optim.Optimizer):
    """Keeps one tensor of state, ``momentum_buffer``."""

    def __init__(self, params, lr=1e-2, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def _init_group(self, group, skip_non_grad_params=True):
        for param in group["params"]:
            if not (skip_non_grad_params and param.grad is None) and not self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)

    @torch.no_grad()
    def step(self):
        """Update the parameters of all groups."""
        for group in self.param_groups:
            self._init_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param]["momentum_buffer"]
                    mean.lerp_(param.grad, 1 - group["momentum"])
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(mean.sign() * param.norm() / param.numel() ** 0.5, alpha=group["lr"])
