"""What several packages share: types, choices, defaults, attribute names and state keys."""

from typing import Literal

import numpy as np
import numpy.typing as npt

type Int64Array = npt.NDArray[np.int64]

TpModeT = Literal["blockwise", "duplicated", "distributed", "exchange", "auto"]
"""How a tensor-parallel matrix is orthogonalized.

``blockwise`` orthogonalizes each rank's shard separately, which is a different update.
``duplicated`` gathers the matrix on every rank. ``distributed`` keeps the shards and all-reduces
Gram matrices. ``exchange`` sends each matrix to one owner rank. ``auto`` picks the cheapest exact
mode.
"""

DEFAULT_MATRIX_BUFFER_MB = 64.0
"""MiB of full matrices that a rank assembles at a time: fills a GPU, small next to the weights."""

SMALLEST_MATRIX_BUFFER_MB = 0.001
"""Smallest allowed wave in MiB."""

DEFAULT_MAX_RANKS_PER_MATRIX = 8
"""Most ranks that compute one matrix together: the usual number of GPUs in a node."""

OptimizerDefaultsT = Literal["megatron", "recommended"]
"""Whose default values the flags take: megatron-core's or this package's."""

STANDARD_OPTIMIZERS = ("adam", "sgd")
"""Element-wise optimizers that megatron-core builds without emerging-optimizers."""

SCALAR_OPTIMIZERS = ("adam", "lion", "sgd")
"""Element-wise optimizers for parameters that are not matrices."""

RATES = frozenset(
    {"lr", "max_lr", "min_lr", "lr_mult", "is_decoupled_lr"}
    | {"weight_decay", "start_wd", "end_wd", "wd_mult"}
)
"""Settings of a parameter group that a scheduler reads or writes."""

CAUTIOUS_DECAY = "cautious_weight_decay"
"""Field and constructor argument of weight decay that depends on the signs of updates."""

IN_RANK_FILES = "in_rank_files"
"""Attribute of a configuration of the trainer's flags: checkpoints have format ``torch``, in which
only megatron-core's own Adam and SGD can save sharded state."""

NO_MUON_ATTRIBUTE = "use_muon"
"""A parameter with this attribute set to ``False`` goes to the scalar optimizer."""

OUTPUT_ATTRIBUTE = "is_embedding_or_output_parameter"
"""megatron-core's mark of word embeddings and output layers."""

STACK_ATTRIBUTE = "eopt_matrix_stack"
"""A 3-D parameter with this attribute set to ``True`` is a stack of matrices (experts)."""

PLACE_ATTRIBUTE = "eopt_place"
"""Attribute of a plain tensor that is part of a parameter: ``(offset, shape of the whole)``."""

GLOBAL_NAME_ATTRIBUTE = "eopt_global_name"
"""Attribute with a parameter's name in the full model, over all pipeline stages and experts."""

COPY_ATTRIBUTE = "eopt_copy"
"""Attribute of a main weight: the model tensor that receives its rounded value in this step."""

# keys of the optimizer state
MOMENTUM = "momentum_buffer"  # of Muon, Lion and SGD
MOMENTUM_SCALE = "momentum_scale"  # block scales of 8-bit momentum
MOMENT2 = "moment2_buffer"  # adaptive Muon's second moments
FIRST_MOMENT = "exp_avg"  # Adam's
STEP = "step"  # a counter of steps

ELEMENT_WISE_STATE = frozenset({FIRST_MOMENT, "exp_avg_sq", "max_exp_avg_sq", MOMENTUM})
"""Keys of state with one value per weight. A shape alone cannot tell: the Kronecker factors of a
square matrix have the matrix's shape."""

# kinds of main weights in checkpoints
MAIN_OF_SHARDED = "param"  # ZeRO-1 shards
MAIN_OF_REPLICATED = "fp32_param"  # full copies
MAIN_KINDS = frozenset({MAIN_OF_SHARDED, MAIN_OF_REPLICATED})
