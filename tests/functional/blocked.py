"""Lets no package of Megatron or Transformer Engine be imported after this module."""

import sys
from importlib.abc import MetaPathFinder

BLOCKED = ("megatron", "transformer_engine")


class Blocked(MetaPathFinder):
    """Finds no package of these names, wherever it is installed."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{fullname} is blocked", name=fullname)


sys.meta_path.insert(0, Blocked())
