"""Trains, saves and loads where Megatron and Transformer Engine cannot be imported.

python tests/functional/torch_alone.py FOLDER

Two processes with FSDP2 take three steps, then one without goes on with two. It prints the norm of
each weight, and that of a run of one process all the way.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from blocked import BLOCKED  # before this package, as on a machine without them
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load, save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from megatron_eopt import TorchOptimizerConfig, build_optimizer
from megatron_eopt.checkpoints import checked, replacing

OPTIMIZERS = ("muon", "adaptive_muon", "soap", "lion", "adam")


class Model(nn.Module):
    """A table, a fused weight, a norm, biases and an output layer, with odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(13, 12)
        # without biases: that of keys would have no gradient but rounding
        self.attention = nn.MultiheadAttention(12, 3, bias=False, batch_first=True)
        self.norm = nn.LayerNorm(12)
        self.up, self.lm_head = nn.Linear(12, 9), nn.Linear(9, 13)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.norm(self.table(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.lm_head(self.up(x).tanh())


def train(name: str, folder: Path, steps: int) -> None:
    """Train with one optimizer from where the folder has come to, and save there."""
    model: nn.Module = Model()
    if dist.get_world_size() > 1:
        fully_shard(model)
    # exact products, so that a batch that is cut otherwise changes rounding alone
    precise = {"muon_fp32_matmul_prec": "highest", "muon_scalar_optimizer": "adam"}
    optimizer = build_optimizer(model, TorchOptimizerConfig(optimizer=name, lr=1e-2, **precise))
    done = 0
    if (folder / ".metadata").exists():
        its_model, its_optimizer = get_state_dict(model, optimizer)
        state = {"model": its_model, "optimizer": its_optimizer, "done": 0}
        with checked(folder) as path:
            load(state, storage_reader=FileSystemReader(path))
        set_state_dict(model, optimizer, model_state_dict=its_model, optim_state_dict=its_optimizer)
        done = state["done"]
    for step in range(done, done + steps):
        tokens = torch.randint(13, (4, 7), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    its_model, its_optimizer = get_state_dict(model, optimizer)
    state = {"model": its_model, "optimizer": its_optimizer, "done": done + steps}
    with replacing(folder) as path:
        save(state, checkpoint_id=path)
    for key, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        if dist.get_world_size() == 1:
            sys.stdout.write(f"{folder.parent.name} {name} {key} {whole.double().norm():.9f}\n")


def train_all(rank: int, folder: Path, steps: int, ranks: int) -> None:
    """Train with all optimizers, then check that nothing has imported what is blocked."""
    store = dist.FileStore(f"{folder}.{ranks}", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    told = ""
    try:
        from megatron_eopt import EmergingOptimizerConfig  # noqa: F401
    except ImportError as error:
        told = str(error)
    assert "TorchOptimizerConfig" in told
    for name in OPTIMIZERS:
        train(name, folder / name, steps)
    assert not {name.partition(".")[0] for name in sys.modules} & set(BLOCKED)
    dist.destroy_process_group()


if __name__ == "__main__":
    resumed, whole = Path(sys.argv[1], "resumed"), Path(sys.argv[1], "whole")
    # forked, because each new process would import torch once more
    processes.start_processes(train_all, (resumed, 3, 2), nprocs=2, start_method="fork")
    train_all(0, resumed, 2, 1)
    train_all(0, whole, 5, 1)
