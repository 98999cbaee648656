"""A pretraining script as users of Megatron-LM have one. It knows nothing of megatron-eopt.

It is written against the public imports of megatron.core and megatron.training only, in the two
ways that the trainer takes a model: from a model provider, or from a model's configuration.
"""

import argparse
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training import get_args, get_tokenizer, pretrain, print_rank_0
from megatron.training.argument_utils import (
    core_transformer_config_from_args,
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args


def add_script_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group(title="this script")
    group.add_argument("--model-from", choices=("provider", "config"), default="provider")
    return parser


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, **groups):
    args = get_args()
    print_rank_0("the model provider was called")
    if config is None:
        config = core_transformer_config_from_args(args)
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        **groups,
    )


def train_valid_test_datasets_provider(num_samples, vp_stage=None):
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=get_tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=True,
    )
    return BlendedMegatronDatasetBuilder(MockGPTDataset, num_samples, lambda: True, config).build()


train_valid_test_datasets_provider.is_distributed = True


def mean_loss(loss_mask, losses):
    mask = loss_mask.view(-1).float()
    total = torch.sum(losses.view(-1).float() * mask)
    count = mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def forward_step(data_iterator, model):
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    losses = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return losses, partial(mean_loss, batch["loss_mask"])


def main():
    args = parse_and_validate_args(
        extra_args_provider=add_script_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    assert not parallel_state.is_initialized()
    from_config = args.model_from == "config"
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args) if from_config else None),
        train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=None if from_config else model_provider,
    )


if __name__ == "__main__":
    main()
