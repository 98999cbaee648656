"""The files of ranks that a verified load looks for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from megatron.core import parallel_state
from megatron.training.checkpointing import get_checkpoint_name
from torch import distributed

from megatron_eopt.checkpoint.rank_files import own_path
from megatron_eopt.checkpoint_files.rank_files import check_rank_files
from megatron_eopt.checkpoints import CheckpointError
from tests.harness import run_ranks

ARGS = SimpleNamespace(
    no_load_optim=False,
    finetune=False,
    use_layer_wise_distributed_optimizer=True,
    ckpt_format="torch",
    use_distributed_optimizer=False,
)


def _with_context_parallelism(root: str) -> None:
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model = Path(get_checkpoint_name(root, 5))
    rank = parallel_state.get_data_parallel_rank()
    # as the trainer names it, and the chain writes it
    state = own_path(str(model.with_name(f"layer_wise_optimizer_{rank}.pt")))
    state.parent.mkdir(parents=True, exist_ok=True)
    for path in (model, state):
        path.touch()
    distributed.barrier()
    check_rank_files(Path(root, "iter_0000005"), None, [], ARGS)
    distributed.barrier()
    if distributed.get_rank() == 1:
        state.unlink()
    distributed.barrier()
    with pytest.raises(CheckpointError, match=state.stem.split("_rank")[0]):
        check_rank_files(Path(root, "iter_0000005"), None, [], ARGS)


def test_ranks_that_megatron_gives_one_name_have_files_of_their_own(tmp_path):
    run_ranks(2, _with_context_parallelism, str(tmp_path))
