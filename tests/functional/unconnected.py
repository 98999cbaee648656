"""Two processes whose accelerate was not told to use CPUs; torchrun starts it."""

import sys

import accelerate
import torch
import transformers

from megatron_eopt import ConfigurationError, EmergingOptimizerConfig
from megatron_eopt.fsdp2 import build_optimizer
from megatron_eopt.hugging_face import MuonTrainer

if __name__ == "__main__":
    model = torch.nn.Linear(4, 4)
    try:
        MuonTrainer(model, transformers.TrainingArguments(sys.argv[1], report_to=[]))
    except ConfigurationError as error:
        sys.stderr.write(f"said: {error}\n")
    accelerate.Accelerator()
    build_optimizer(model, EmergingOptimizerConfig(optimizer="muon", lr=0.1))
