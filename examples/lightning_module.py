"""Train a small Llama with Muon and PyTorch Lightning, on one device or sharded over several.

python examples/lightning_module.py
torchrun --nproc-per-node 2 examples/lightning_module.py --devices 2
"""

import argparse

import lightning
import torch
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

from megatron_eopt import TorchOptimizerConfig, build_optimizer


class WithMuon(lightning.LightningModule):
    """A module that trains ``self.model`` with Muon, sharded if the strategy has a device mesh."""

    def configure_model(self):
        """Shard the model's layers, then the rest of it."""
        if self.device_mesh is not None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self):
        """Build the optimizer; Lightning calls this after ``configure_model``."""
        config = TorchOptimizerConfig(optimizer="muon", lr=1e-3, weight_decay=0.1)
        optimizer = build_optimizer(self, config)
        warm_up = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


class LanguageModel(WithMuon):
    """A decoder with random weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64}
        layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(**sizes, **layers)
        self.model = transformers.LlamaForCausalLM(config)
        self.losses: list[float] = []

    def training_step(self, batch, _):
        """Return the loss of a batch."""
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        """Return batches of sequences that count up by one to four."""
        data = [torch.arange(16) * (number % 4 + 1) % 128 for number in range(32)]
        return torch.utils.data.DataLoader(data, batch_size=4)


def train(devices: int = 1, resume: str | None = None, **options) -> list[float]:
    """Return this process's losses, starting at the checkpoint if one is resumed."""
    if devices > 1:
        options["strategy"] = ModelParallelStrategy(devices, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        devices=devices, max_steps=8, gradient_clip_val=1.0, logger=False, **options
    )
    model = LanguageModel()
    trainer.fit(model, ckpt_path=resume)
    return model.losses


def main() -> None:
    """Parse flags and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    losses = train(args.devices, enable_checkpointing=False)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
