"""A progress bar of the trainer, where standard error is a terminal."""

import functools
import inspect
import sys
from typing import Any

from tqdm import tqdm

from megatron_eopt.checkpoint.trainer import Function


def with_progress(original: Function) -> Function:
    """Let ``training_log`` show iterations done, time left, and the losses that it prints.

    The bar is on the rank that prints the trainer's lines, the last one.
    """
    signature = inspect.signature(original)
    bars: list[tqdm[Any]] = []

    @functools.wraps(original)
    def training_log(*values: Any, **kwargs: Any) -> Any:
        # these load what must not be loaded before the device is chosen
        from megatron.training.global_vars import get_args
        from megatron.training.utils import is_last_rank

        if not (sys.stderr.isatty() and is_last_rank()):
            return original(*values, **kwargs)
        args, given = get_args(), signature.bind(*values, **kwargs).arguments
        iteration, total = given["iteration"], args.train_iters
        bar = bars.pop() if bars else tqdm(None, "Training", total, initial=iteration - 1)
        bar.clear()  # for the lines that come
        result = original(*values, **kwargs)
        if iteration % args.log_interval == 0:
            # the trainer has waited for the device
            losses = {name: float(loss.float().mean()) for name, loss in given["loss_dict"].items()}
            bar.set_postfix(losses, refresh=False)
        bar.update(iteration - bar.n)
        bar.refresh()
        if iteration < total:
            bars.append(bar)
        else:
            bar.close()
        return result

    return training_log
