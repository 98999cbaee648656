"""Trains with MuonTrainer where Megatron and Transformer Engine cannot be imported.

python tests/functional/trainer_alone.py FOLDER
"""

import sys

import torch
from torch import Tensor, nn
from torch_alone import BLOCKED, Model
from transformers import TrainingArguments

from megatron_eopt.hugging_face import MuonTrainer


class Language(Model):
    """Returns its loss, as models of transformers do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        logits = super().forward(input_ids).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


def main(folder: str) -> None:
    """Train four steps."""
    rows = torch.randint(13, (16, 7), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row.roll(1)} for row in rows]
    args = TrainingArguments(folder, max_steps=4, report_to=[], use_cpu=True, logging_steps=1)
    trainer = MuonTrainer(Language(), args, train_dataset=data)
    trainer.train()
    assert trainer.state.global_step == 4
    assert type(trainer.optimizer.optimizer).__name__ == "DTensorOptimizer"
    assert not {name.partition(".")[0] for name in sys.modules} & set(BLOCKED)


if __name__ == "__main__":
    main(sys.argv[1])
