"""What is replaced only if flags of the command line ask for it."""

import argparse
from collections.abc import Callable

from megatron_eopt import checkpoint_files
from megatron_eopt.checkpoint.trainer import Rebindings
from megatron_eopt.megatron_lm import stats
from megatron_eopt.megatron_lm.rebinding import Exchange, Rebinding

BY_FLAG: dict[str, Callable[[], Rebindings]] = {
    "verify_checkpoints": checkpoint_files.trainer_rebindings,
    "print_state_checksum": checkpoint_files.checksum_rebindings,
    "log_optimizer_stats": stats.trainer_rebindings,
}
"""By parsed name, what gives the names to replace; later ones are put around earlier ones."""


class FollowsFlags:
    """Replaces what the flags that were parsed last ask for."""

    def __init__(self) -> None:
        self._exchanges: dict[str, Exchange] = {}

    def follow(self, args: argparse.Namespace) -> None:
        """Replace what ``args`` ask for, and put back what they do not."""
        flags = [flag for flag in BY_FLAG if getattr(args, flag, False)]
        if flags == list(self._exchanges):
            return
        self.undo()
        for flag in flags:
            exchange = Exchange()
            exchange.apply([Rebinding(*names) for names in BY_FLAG[flag]()])
            self._exchanges[flag] = exchange

    def undo(self) -> None:
        """Put everything back, what was replaced last first."""
        while self._exchanges:
            self._exchanges.popitem()[1].undo()


FLAGS = FollowsFlags()
"""Of this process."""
