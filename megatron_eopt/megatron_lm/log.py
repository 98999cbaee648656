"""Adds the optimizer's scalars and a progress bar to the trainer's log."""

import inspect
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from megatron_eopt.base.wrapping import Function, around
from megatron_eopt.wrappers.chain import OptimizerChain


class TrainingLog:
    """Measures the optimizer's step in logged iterations and writes the scalars.

    With ``--log-optimizer-stats``, all ranks measure iterations that are multiples of both
    ``--log-interval`` and ``--tensorboard-log-interval``. If standard error is a terminal, the last
    rank shows a progress bar with the losses.
    """

    def __init__(self) -> None:
        self._measured: OptimizerChain | None = None
        self._bar: tqdm[Any] | None = None

        self.wrappers = {"train_step": around(self._step), "training_log": around(self._log)}

    def _step(self, original: Function, *values: Any, **kwargs: Any) -> Any:
        """Run Megatron's ``train_step``, measuring the optimizer if the iteration is logged."""
        optimizer = inspect.signature(original).bind(*values, **kwargs).arguments["optimizer"]
        if isinstance(optimizer, OptimizerChain):
            self._measure(optimizer)
        return original(*values, **kwargs)

    def _log(self, original: Function, *values: Any, **kwargs: Any) -> Any:
        """Run Megatron's ``training_log``, then write the scalars; collective if measured."""
        given = inspect.signature(original).bind(*values, **kwargs).arguments
        if self._bar is not None:
            self._bar.clear()  # so that the trainer's lines do not mix with the bar
        result = original(*values, **kwargs)
        if self._measured is not None:
            # on all ranks, because the first call sums over them
            write_scalars(self._measured.stats(), given["iteration"])
            self._measured = None
        self._show(given)
        return result

    def _measure(self, optimizer: OptimizerChain) -> None:
        # imported late, because they must not load before the device is chosen
        from megatron.training.global_vars import get_args

        args = get_args()
        if not getattr(args, "log_optimizer_stats", False):
            return
        # the trainer counts an iteration only after its step
        iteration = args.curr_iteration + 1
        intervals = (args.log_interval, args.tensorboard_log_interval)
        optimizer.collects_stats = not any(iteration % interval for interval in intervals)
        self._measured = optimizer if optimizer.collects_stats else None

    def _show(self, given: Mapping[str, Any]) -> None:
        from megatron.training.global_vars import get_args
        from megatron.training.utils import is_last_rank

        if not (sys.stderr.isatty() and is_last_rank()):
            return
        args, iteration = get_args(), given["iteration"]
        total = args.train_iters
        bar = self._bar or tqdm(None, "Training", total, initial=iteration - 1)
        if iteration % args.log_interval == 0:
            # the trainer has just synchronized with the device, so reading losses costs nothing
            losses = {name: float(loss.float().mean()) for name, loss in given["loss_dict"].items()}
            bar.set_postfix(losses, refresh=False)
        bar.update(iteration - bar.n)
        bar.refresh()
        self._bar = bar if iteration < total else None
        if self._bar is None:
            bar.close()


def write_scalars(scalars: dict[str, float], iteration: int) -> None:
    """Write scalars to TensorBoard and W&B as the trainer does, on the rank with writers."""
    from megatron.training import global_vars

    samples = global_vars.get_args().consumed_train_samples
    if (writer := global_vars.get_tensorboard_writer()) is not None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
            writer.add_scalar(f"{name} vs samples", value, samples)
    if (run := global_vars.get_wandb_writer()) is not None:
        run.log(scalars, iteration)
