"""What the server process imports once, from which ranks are forked."""

import gc

# modules make half a million objects that stay: looking for garbage among them takes a second here,
# and a tenth of the time of ranks, which inherit this
gc.set_threshold(50_000, 20, 20)

import megatron.core.models.gpt.gpt_layer_specs
import megatron.training.training

import megatron_eopt.megatron_lm
