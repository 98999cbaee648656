"""What comes of malformed input: an error that explains itself, success, or a defect."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from megatron_eopt import ConfigurationError, ConfigurationTypeError

EXPLAINED = (ConfigurationError, ConfigurationTypeError)


@dataclass
class Outcomes:
    """How many examples were refused and how many trained, and all else that happened."""

    refused: int = 0
    trained: int = 0
    defects: list[str] = field(default_factory=list)

    def add(self, example: Any, attempt: Callable[[], None]) -> None:
        """Try an example."""
        try:
            attempt()
        except EXPLAINED as error:
            # what, its value, the rule, and the way out
            if "=" in str(error) and str(error).endswith("."):
                self.refused += 1
            else:
                self.defects.append(f"{example!r} is not explained by: {error}")
        except Exception:
            self.defects.append(f"{example!r}\n{traceback.format_exc(limit=-6)}")
        else:
            self.trained += 1
