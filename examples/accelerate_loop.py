"""Train a small Llama with Muon in your own training loop with accelerate.

    accelerate launch examples/accelerate_loop.py
    torchrun --nproc-per-node 2 examples/accelerate_loop.py

Choose with ``accelerate config`` whether the model is replicated or sharded by FSDP2.
"""

from collections.abc import Iterator

import torch
import transformers
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR

from megatron_eopt import TorchOptimizerConfig, build_optimizer


def prepare(accelerator, model, loader):
    """Return the sharded model, its optimizer, a scheduler and the data loader."""
    config = TorchOptimizerConfig(
        optimizer="muon",
        lr=1e-3,  # as for AdamW
        weight_decay=0.1,
        clip_grad=0.0,  # the loop clips
    )
    # accelerate needs an optimizer when it shards the model with FSDP2, so pass an empty one
    empty = torch.optim.SGD([{"params": []}])
    model, _, loader = accelerator.prepare(model, empty, loader)
    accelerator._optimizers.clear()
    optimizer = accelerator.prepare_optimizer(build_optimizer(model, config))
    warm_up = LambdaLR(optimizer, lambda step: min(1, (step + 1) / 4))
    return model, optimizer, accelerator.prepare(warm_up), loader


def make_model() -> torch.nn.Module:
    """Return a model of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def make_data(samples: int = 64, length: int = 16) -> list[torch.Tensor]:
    """Return sequences that count up by one to five."""
    return [torch.arange(length) * (number % 5 + 1) % 128 for number in range(samples)]


def train(accelerator: Accelerator) -> Iterator[float]:
    """Yield the loss of each batch; gradients of two batches are accumulated for a step."""
    loader = torch.utils.data.DataLoader(make_data(), batch_size=4)
    model, optimizer, scheduler, loader = prepare(accelerator, make_model(), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        yield accelerator.reduce(loss.detach(), "mean").item()


def main() -> None:
    """Train and print the losses."""
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    for number, loss in enumerate(train(accelerator)):
        accelerator.print(f"batch {number}: loss {loss:.4f}")


if __name__ == "__main__":
    main()
