"""Pretrain a GPT with Megatron's trainer and the optimizers of megatron-eopt.

It takes all flags of Megatron-LM's pretrain_gpt.py. With --hybrid-layer-pattern it trains a
HybridModel and takes the flags of Megatron-LM's pretrain_hybrid.py. Start it with torchrun:

    torchrun --nproc-per-node 2 scripts/pretrain_gpt.py --num-layers 4 ... --optimizer muon

Without a GPU, the processes run on the CPU and communicate with gloo. MEGATRON_EOPT_DEVICE=cpu or
cuda overrides this choice.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from megatron_eopt.base.quiet import ignore_useless_warnings, report_errors_once

ignore_useless_warnings()
report_errors_once()

from megatron_eopt import cpu, megatron_lm

# This must come before megatron.training is imported, which queries the GPU on import.
cpu.enable_if_chosen()

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args, parse_args
from megatron.training.utils import get_blend_and_blend_per_split


def datasets_provider(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, ...]:
    """Return the train, valid and test data sets that the flags choose.

    Args:
        num_samples: Number of samples of each data set.
        vp_stage: The virtual pipeline stage; unused, since all stages read the same data.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    dataset = MockGPTDataset if args.mock_data else GPTDataset
    return tuple(BlendedMegatronDatasetBuilder(dataset, num_samples, lambda: True, config).build())


# Each rank reads its own samples instead of receiving them from tensor-parallel rank 0.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def next_batch(iterator: Iterator[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor | None]:
    """Return the next micro-batch; tokens, labels, ... have the shape (micro-batch, sequence)."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if stages > 1 and not (first or last):
        return dict.fromkeys(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
    batch = {name: value.cuda(non_blocking=True) for name, value in next(iterator).items()}
    return {"attention_mask": None, **batch}


def masked_loss(
    loss_mask: torch.Tensor, per_token: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (summed loss, number of tokens, values to log) of one micro-batch.

    Args:
        loss_mask: 1 for each token that counts, of shape (micro-batch, sequence).
        per_token: Cross entropy in nats, of the same shape.
    """
    mask = loss_mask.reshape(-1).float()
    loss = (per_token.reshape(-1).float() * mask).sum()
    tokens = mask.sum()
    if get_args().check_for_nan_in_loss_and_grad:
        for kind, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            get_rerun_state_machine().validate_result(
                result=loss, rejection_func=is_bad, message=f"the loss of a micro-batch is {kind}"
            )
    report = torch.stack([loss.detach(), tokens])
    return loss, tokens.to(torch.int), {"lm loss": report}


def forward_step(
    iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module
) -> tuple[torch.Tensor, Any]:
    """Run the forward pass of one micro-batch, for Megatron's schedules."""
    batch = next_batch(iterator)
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, partial(masked_loss, batch["loss_mask"])


def main() -> None:
    if cpu.is_enabled():
        # Check CPU support first, since the trainer's own checks assume a GPU.
        cpu.check_supported(parse_args(megatron_lm.add_arguments))
    with megatron_lm.installed():
        args = parse_and_validate_args(megatron_lm.add_arguments)
        model_config = (
            hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
        )
        config = pretrain_cfg_container_from_args(args, model_cfg=model_config(args))
        pretrain(config, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
