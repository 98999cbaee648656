"""Old names of public classes and functions, which work for one more release."""

import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

logger = logging.getLogger(__name__)


def renamed(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module in which old ``names`` have become others."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = "%s.%s is called %s now: the old name goes with the next release"
        logger.warning(text, module, name, names[name])
        return getattr(sys.modules[module], names[name])

    return find
