"""Pretrain a small byte-level GPT with plain PyTorch, FSDP2 and the optimizers of megatron-eopt.

    torchrun --nproc-per-node 2 examples/fsdp2_pretrain.py --config examples/muon_on_fsdp2.yaml

It saves a checkpoint at the end. With --resume it continues from there, also on another number of
processes. By default it reads the source code of Python's standard library, as the quickstart does.
It runs on GPUs if each process finds one, and otherwise on the CPU.
"""

import argparse
import math
import os
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from megatron_eopt import build_optimizer, checkpoints, load_optimizer_config

VOCABULARY = 257
END_OF_FILE = 256


class Block(nn.Module):
    """Attention and a feed-forward network, each after a norm.

    Args:
        hidden: Hidden size.
        heads: Number of attention heads.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.RMSNorm(hidden)
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, hidden, bias=False)
        self.value = nn.Linear(hidden, hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.norm2 = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, sequence, hidden) to the same shape."""
        batch, length, hidden = x.shape
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder with learned position embeddings.

    Args:
        layers: Number of blocks.
        hidden: Hidden size.
        heads: Number of attention heads.
        length: Maximum sequence length.
    """

    def __init__(self, layers: int, hidden: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, VOCABULARY, bias=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (batch, sequence) to logits (batch, sequence, vocabulary)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def read_tokens(folder: Path, suffix: str, most: int) -> Tensor:
    """Return the files' bytes, with END_OF_FILE after each file; at most ``most`` tokens."""
    pieces: list[Tensor] = []
    for path in sorted(folder.glob(f"*{suffix}")):
        if data := path.read_bytes():
            pieces += [torch.tensor(list(data)), torch.tensor([END_OF_FILE])]
        if sum(map(len, pieces)) > most:
            break
    if not pieces:
        raise SystemExit(f"--text {folder}: contains no file that ends in {suffix}.")
    return torch.cat(pieces)[:most]


def batch(tokens: Tensor, step: int, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Return a step's (inputs, labels) of shape (size, length), for all ranks together."""
    generator = torch.Generator().manual_seed(1234 + step)
    starts = torch.randint(len(tokens) - length - 1, (size,), generator=generator)
    windows = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])
    return windows[:, :-1], windows[:, 1:]


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, folder: Path) -> None:
    """Write weights, optimizer state and the number of steps; replaces an older checkpoint.

    torch's ``dcp.save`` alone writes over the files of an older checkpoint, one after another. If
    it is killed, a later load takes some values from each of them, without an error.
    """
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": step}
    with checkpoints.replacing(folder) as path:
        dcp.save(saved, checkpoint_id=path)


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> int:
    """Load what :func:`save` has written last, and return the number of steps."""
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "step": 0}
    with checkpoints.checked(folder) as path:
        dcp.load(saved, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    return int(saved["step"])


def schedule(step: int, steps: int) -> float:
    """Return the learning rate's factor: a short warm-up, then a cosine down to 0.1."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Build the sharded model and its optimizer, and train."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = GPT(args.layers, args.hidden, args.heads, args.seq_length).to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    config = load_optimizer_config(args.config)
    optimizer = build_optimizer(model, config)
    rates = [group["lr"] for group in optimizer.param_groups]
    done = load(model, optimizer, args.checkpoint) if args.resume else 0
    # loaded groups have the rates of the checkpoint; this run uses those of its own file
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = group["initial_lr"] = rate
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: schedule(n + done, args.steps)
    )

    if done >= args.steps and rank == 0:
        print(f"The checkpoint has {done} steps. Pass more --steps to go on.")
    tokens = read_tokens(args.text, args.suffix, args.tokens)
    for step in range(done + 1, args.steps + 1):
        inputs, labels = (
            part.chunk(world)[rank].to(device)
            for part in batch(tokens, step, args.batch_size, args.seq_length)
        )
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        if config.clip_grad:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad, error_if_nonfinite=True)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}/{args.steps}: loss {mean.item():.4f}", flush=True)
        if step == args.stop or step == args.steps:
            save(model, optimizer, step, args.checkpoint)
            return


def main() -> None:
    """Parse flags, connect the processes and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", required=True, type=Path, help="YAML file with the optimizer's settings"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stop", type=int, help="step after which to save and stop earlier")
    parser.add_argument(
        "--checkpoint", type=Path, default=Path("runs/fsdp2"), help="folder of the checkpoint"
    )
    parser.add_argument("--resume", action="store_true", help="continue from the checkpoint")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_paths()["stdlib"]))
    parser.add_argument("--suffix", default=".py", help="suffix of the files to read")
    parser.add_argument(
        "--tokens", type=int, default=2_000_000, help="maximum number of bytes to read"
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step")
    args = parser.parse_args()
    local_rank, local_world = (int(os.environ[f"LOCAL_{name}"]) for name in ("RANK", "WORLD_SIZE"))
    on_gpu = torch.cuda.device_count() >= local_world
    device = torch.device(f"cuda:{local_rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
