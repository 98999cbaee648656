"""Names that several layers share: the choices a user can make, and older spellings of them."""

from typing import Literal

TpModeT = Literal["blockwise", "duplicated", "distributed", "exchange", "auto"]
"""Where the orthogonalization of a tensor-parallel matrix happens.

``blockwise`` orthogonalizes each rank's piece by itself, which is a different update;
``duplicated`` gathers the matrix on every rank; ``distributed`` keeps the pieces and reduces Gram
matrices; ``exchange`` brings each matrix to one owner; ``auto`` picks the cheapest exact one.
"""

DEFAULT_WAVE_MB = 64.0
"""MiB of whole matrices that one rank brings together at a time: enough to fill a GPU, and little
beside the weights."""

SMALLEST_WAVE_MB = 0.001
"""Less holds no matrix worth bringing together."""

DEFAULT_TEAM_SIZE = 8
"""Most ranks that compute a matrix together: as many as a computer with fast links has GPUs."""

OptimizerDefaultsT = Literal["megatron", "recommended"]
"""Whose default values a command line means."""

STANDARD_OPTIMIZERS = ("adam", "sgd")
"""Element-wise optimizers that megatron-core builds without emerging-optimizers."""

SCALAR_OPTIMIZERS = ("adam", "lion", "sgd")
"""Element-wise optimizers for what is no matrix."""

NO_MUON_ATTRIBUTE = "use_muon"
"""A parameter with this attribute set to ``False`` goes to the scalar optimizer."""

STACK_ATTRIBUTE = "eopt_matrix_stack"
"""A 3-D parameter with this attribute set to ``True`` is a stack of matrices (experts)."""

GLOBAL_NAME_ATTRIBUTE = "eopt_global_name"
"""Where a parameter keeps its name in the whole model, of all pipeline stages and experts."""

COPY_ATTRIBUTE = "eopt_copy"
"""Where a main weight has, during a step, the model's tensor that gets it rounded."""

# keys of optimizer state
MOMENTUM = "momentum_buffer"  # of Muon, Lion and SGD
MOMENTUM_SCALE = "momentum_scale"  # of its blocks, where it is kept in 8 bits
MOMENT2 = "moment2_buffer"  # adaptive Muon's second moments
FIRST_MOMENT = "exp_avg"  # Adam's
STEP = "step"  # a counter of steps

ELEMENT_WISE_STATE = frozenset({FIRST_MOMENT, "exp_avg_sq", "max_exp_avg_sq", MOMENTUM})
"""Kinds of optimizer state that have one number for each of the parameter. Of other kinds the shape
does not tell: the Kronecker factors of a square matrix look like one."""

# kinds of main weights in checkpoints
MAIN_OF_SHARDED = "param"  # of ZeRO-1 fragments
MAIN_OF_REPLICATED = "fp32_param"  # of optimizers that keep whole parameters
