"""What ``--log-optimizer-stats`` adds to the trainer: steps to watch, and scalars of them."""

import functools
import inspect
from typing import Any

from megatron_eopt.build.chain import OptimizerChain
from megatron_eopt.checkpoint.trainer import Function, wrapped
from megatron_eopt.megatron_lm.rebinding import Exchange, Rebinding

_EXCHANGE = Exchange()


class StepScalars:
    """Watches the optimizer's steps in logged iterations, and writes what it did there.

    These are the iterations that are multiples of ``--log-interval`` and of
    ``--tensorboard-log-interval``, on all ranks alike.
    """

    def __init__(self) -> None:
        self._logged: OptimizerChain | None = None

    def around_step(self, original: Function) -> Function:
        """Return ``train_step`` with the optimizer watched if its iteration is logged."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def train_step(*values: Any, **kwargs: Any) -> Any:
            optimizer = signature.bind(*values, **kwargs).arguments["optimizer"]
            if optimizer is not None:
                self._begin(optimizer)
            return original(*values, **kwargs)

        return train_step

    def around_log(self, original: Function) -> Function:
        """Return ``training_log`` which writes the scalars too; collective if there are some."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def training_log(*values: Any, **kwargs: Any) -> Any:
            result = original(*values, **kwargs)
            if self._logged is not None:
                iteration = signature.bind(*values, **kwargs).arguments["iteration"]
                _write(self._logged.stats(), iteration)
                self._logged = None
            return result

        return training_log

    def _begin(self, optimizer: Any) -> None:
        if not isinstance(optimizer, OptimizerChain):
            return
        from megatron.training.global_vars import get_args

        args = get_args()
        iteration = args.curr_iteration + 1
        intervals = (args.log_interval, args.tensorboard_log_interval)
        optimizer.watching = not any(iteration % interval for interval in intervals)
        self._logged = optimizer if optimizer.watching else None


def follow(args: Any) -> None:
    """Replace the trainer's functions if ``args`` ask for it, else put them back."""
    wanted = getattr(args, "log_optimizer_stats", False)
    if wanted and not _EXCHANGE.active:
        scalars = StepScalars()
        names = wrapped({"train_step": scalars.around_step, "training_log": scalars.around_log})
        _EXCHANGE.apply([Rebinding(*item) for item in names])
    elif not wanted:
        undo()


def undo() -> None:
    """Put the trainer's functions back."""
    if _EXCHANGE.active:
        _EXCHANGE.undo()


def _write(scalars: dict[str, float], iteration: int) -> None:
    """Write scalars as the trainer writes its own, on the rank that has writers."""
    from megatron.training import global_vars

    samples = global_vars.get_args().consumed_train_samples
    if (writer := global_vars.get_tensorboard_writer()) is not None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
            writer.add_scalar(f"{name} vs samples", value, samples)
    if (run := global_vars.get_wandb_writer()) is not None:
        run.log(scalars, iteration)
