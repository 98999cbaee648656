"""The Trainer of Hugging Face's transformers, with the optimizers of this package.

It needs ``pip install 'megatron-eopt[trainers]'``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_eopt.base.quiet import importing_quietly

with importing_quietly():
    import torch
    import transformers
    from accelerate.utils.constants import OPTIMIZER_NAME  # type: ignore[import-untyped]
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import trainer

    from megatron_eopt.base.agreement import unconnected_processes
    from megatron_eopt.base.errors import ConfigurationError, refuse_deepspeed
    from megatron_eopt.config.config import TorchOptimizerConfig
    from megatron_eopt.config.registry import Overrides
    from megatron_eopt.fsdp2 import build_optimizer
    from megatron_eopt.routing.groups import GROUP_ID
    from megatron_eopt.state.groups import PARAM_NAMES, is_identified


class MuonTrainer(transformers.Trainer):
    """Trains on one device, with DDP or with FSDP2; its optimizer is built on the sharded model.

    Args:
        *args: Of ``transformers.Trainer``.
        optimizer_config: The optimizer and its settings. None for Muon, whose updates have AdamW's
            size, with the rate, weight decay and settings of Adam of the ``TrainingArguments``.
        config_overrides: Settings of single parameters, as for :func:`build_optimizer`.
        print_optimizer_routing: Whether to print which parameter gets which optimizer.
        **kwargs: Of ``transformers.Trainer``.

    Raises:
        ConfigurationError: If there are several processes that are not connected, so that each
            would train a model of its own, or with DeepSpeed.
    """

    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        optimizer_config: TorchOptimizerConfig | None = None,
        config_overrides: Overrides | None = None,
        print_optimizer_routing: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        refuse_deepspeed(self.is_deepspeed_enabled)
        if processes := unconnected_processes():
            rule = "processes were started that are not connected: each would train its own model"
            hint = "On CPUs, pass use_cpu=True to TrainingArguments"
            raise ConfigurationError("WORLD_SIZE", processes, rule, hint)
        config = optimizer_config or TorchOptimizerConfig(
            optimizer="muon",
            lr=self.args.learning_rate,
            weight_decay=self.args.weight_decay,
            adam_beta1=self.args.adam_beta1,
            adam_beta2=self.args.adam_beta2,
            adam_eps=self.args.adam_epsilon,
        )
        if self.args.max_grad_norm:
            # the Trainer clips, so nothing has to say that the optimizer does not
            config = replace(config, clip_grad=0.0)
        if print_optimizer_routing:
            config = replace(config, print_optimizer_routing=True)
        self.optimizer_config, self.config_overrides = config, config_overrides

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return an empty optimizer, because accelerate needs one when it shards the model."""
        self.optimizer = self.optimizer or torch.optim.SGD([{"params": []}])
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Replace the empty optimizer, now that the model is sharded."""
        model: Any = self.model
        optimizer = build_optimizer(model, self.optimizer_config, self.config_overrides)
        self.accelerator._optimizers.clear()
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)
        return super().create_scheduler(num_training_steps, self.optimizer)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Resume at the checkpoint's step of this run's schedule, with this run's rates."""
        scheduler = self.lr_scheduler

        def resume(saved: dict[str, Any]) -> None:
            # without rates, which torch matches by the order of groups: overrides change it
            steps = {"last_epoch": saved["last_epoch"] - 1, "_step_count": saved["_step_count"]}
            scheduler.load_state_dict({**steps, "lr_lambdas": []})
            scheduler.step()

        if isinstance(scheduler, LambdaLR):
            self.lr_scheduler = SimpleNamespace(load_state_dict=resume)
        with self._reading_adamw(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
        self.lr_scheduler = scheduler

    @contextmanager
    def _reading_adamw(self, checkpoint: str | None) -> Iterator[None]:
        """Let the optimizer load what a ``Trainer`` has saved of AdamW, which names no optimizer.

        Its parameters are in the two groups of the Trainer's own optimizers.
        """
        if checkpoint is None or _is_ours(Path(checkpoint)):
            yield
            return
        prepared: Any = self.optimizer
        model: Any = self.model
        decayed = set(self.get_decay_parameter_names(model))
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        names = [[n for n in params if n in decayed], [n for n in params if n not in decayed]]
        adamw = torch.optim.AdamW([{"params": [params[name] for name in its]} for its in names])
        self.optimizer = adamw
        try:
            yield
        finally:
            self.optimizer = prepared
        if self.is_fsdp_enabled:
            set_optimizer_state_dict(
                model, prepared.optimizer, get_optimizer_state_dict(model, adamw)
            )
        else:
            state: Any = adamw.state_dict()
            groups = zip(state["param_groups"], names, strict=True)
            state["param_groups"] = [{**group, PARAM_NAMES: its} for group, its in groups]
            prepared.load_state_dict(state)


def _is_ours(checkpoint: Path) -> bool:
    """Return whether an optimizer of this package has saved a checkpoint, or no optimizer has."""
    sharded = checkpoint / f"{OPTIMIZER_NAME}_0"
    if (sharded / ".metadata").exists():
        keys = FileSystemReader(sharded).read_metadata().state_dict_metadata
        return any(key.endswith(GROUP_ID) for key in keys)
    for name in (trainer.OPTIMIZER_NAME, trainer.OPTIMIZER_NAME_BIN):
        if (checkpoint / name).is_file():
            # without its values
            saved = torch.load(checkpoint / name, map_location="meta", weights_only=True)
            return any(map(is_identified, saved["param_groups"]))
    return True
