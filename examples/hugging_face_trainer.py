"""Train a small Llama, Qwen3 or Qwen3-MoE with Muon and the Trainer of transformers.

    python examples/hugging_face_trainer.py --model qwen3_moe
    torchrun --nproc-per-node 2 examples/hugging_face_trainer.py --fsdp

The model has random weights and the data is generated, so nothing is downloaded.
"""

import argparse
import os

import torch
import transformers

from megatron_eopt.hugging_face import MuonTrainer


def make_model(kind: str) -> torch.nn.Module:
    """Return a model of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=8))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=8)
    return transformers.Qwen3MoeForCausalLM(config)


def make_data(samples: int = 64, length: int = 16) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count up by one to five."""
    tokens = (torch.arange(length) * (number % 5 + 1) % 128 for number in range(samples))
    return [{"input_ids": item, "labels": item} for item in tokens]


def train(
    model: torch.nn.Module,
    folder: str,
    resume: str | None = None,
    overrides: dict | None = None,
    **options,
) -> list[float]:
    """Return the loss of each step, including the steps before a resumed checkpoint."""
    arguments = transformers.TrainingArguments(
        folder,
        learning_rate=3e-3,
        weight_decay=0.1,
        max_steps=8,
        save_steps=4,
        logging_steps=1,
        report_to=[],
        dataloader_pin_memory=torch.cuda.is_available(),
        **options,
    )
    trainer = MuonTrainer(
        model,
        arguments,
        train_dataset=make_data(),
        config_overrides=overrides,
        print_optimizer_routing=resume is None,
    )
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def shard_on_cpus() -> None:
    """Let accelerate shard on CPUs, to try that; by itself it shards on GPUs only."""
    from accelerate import DistributedType, PartialState

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def main() -> None:
    """Parse flags and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["llama", "qwen3", "qwen3_moe"], default="llama")
    parser.add_argument(
        "--output", default="runs/hugging_face_trainer", help="folder for checkpoints"
    )
    parser.add_argument("--fsdp", action="store_true", help="shard the model over the processes")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        if args.fsdp and torch.distributed.is_torchelastic_launched():
            shard_on_cpus()
        else:
            # otherwise processes on CPUs do not find each other
            os.environ["ACCELERATE_USE_CPU"] = "true"
    options = {"fsdp": True, "fsdp_config": {"version": 2}} if args.fsdp else {}
    losses = train(make_model(args.model), args.output, **options)
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
