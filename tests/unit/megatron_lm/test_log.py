"""What is written where, and the progress bar, with a trainer's function that does nothing."""

import io
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

from megatron_eopt.megatron_lm.log import TrainingLog, write_scalars
from tests.harness import run_ranks
from tests.harness.each_rank import on_ranks


@on_ranks(1)
def test_both_writers_get_what_megatron_would_write():
    """A writer of TensorBoard and a run of W&B."""
    from megatron.training import global_vars

    board, run = mock.Mock(spec=["add_scalar"]), mock.Mock(spec=["log"])
    args = SimpleNamespace(consumed_train_samples=80)
    writers = {"get_tensorboard_writer": lambda: board, "get_wandb_writer": lambda: run}
    with mock.patch.multiple(global_vars, get_args=lambda: args, **writers):
        write_scalars({"Adam/weight-rms": 0.5}, 10)
    expected = [("Adam/weight-rms", 0.5, 10), ("Adam/weight-rms vs samples", 0.5, 80)]
    assert [each.args for each in board.add_scalar.call_args_list] == expected
    assert [each.args for each in run.log.call_args_list] == [({"Adam/weight-rms": 0.5}, 10)]


def shown(is_terminal: bool, prints: bool) -> tuple[list[int], str]:
    """Return what was logged, and what came to standard error."""
    import torch
    from megatron.training import global_vars, utils

    def training_log(loss_dict: Any, iteration: int) -> int:
        return iteration

    args, terminal = SimpleNamespace(train_iters=4, log_interval=2), io.StringIO()
    terminal.isatty = lambda: is_terminal  # type: ignore[method-assign]
    with (
        mock.patch.object(global_vars, "get_args", return_value=args),
        mock.patch.object(utils, "is_last_rank", return_value=prints),
        mock.patch.object(sys, "stderr", terminal),
    ):
        logged = TrainingLog().wrappers["training_log"](training_log)
        loss = {"lm loss": torch.tensor([2.5])}
        # a run that goes on after its second iteration
        return [logged(loss, iteration=number) for number in (3, 4)], terminal.getvalue()


def test_a_bar_is_on_a_terminal_alone():
    for case in ((True, False), (False, True)):
        assert run_ranks(1, shown, *case)[0] == ([3, 4], "")
    logged, text = run_ranks(1, shown, True, True)[0]
    assert logged == [3, 4]
    assert "75%" in text.split("100%")[0]
    assert "4/4" in text
    assert "lm loss=2.5" in text
