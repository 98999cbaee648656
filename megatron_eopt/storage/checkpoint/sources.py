"""Where each kind of state is read from, and what happens to the kinds a checkpoint lacks."""

from collections.abc import Collection

from megatron_eopt.base.errors import ConfigurationError
from megatron_eopt.base.names import FIRST_MOMENT, MOMENTUM, STEP

__all__ = ["MAIN", "MAIN_OF_PLAIN", "Index", "Sources"]

MAIN = "param"
"""Name of main weights in checkpoints of fragments."""

MAIN_OF_PLAIN = "fp32_param"
"""Name of main weights in checkpoints of optimizers that keep whole parameters."""

_SHOWN = 12


class Index:
    """The kinds of state that a checkpoint has, by what they belong to.

    Args:
        available: Keys of the checkpoint's tensors and objects.
        prefix: What the keys start with; the kind of state follows, then what it belongs to.
    """

    def __init__(self, available: Collection[str], prefix: str) -> None:
        self._kinds: dict[str, set[str]] = {}
        for key in available:
            if key.startswith(prefix):
                kind, _, name = key[len(prefix) :].partition(".")
                self._kinds.setdefault(name.partition("/shard_")[0], set()).add(kind)

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def kinds(self, *names: str) -> set[str]:
        """Return the kinds of state that all of ``names`` have."""
        found = [self._kinds.get(name, set()) for name in names]
        return set.intersection(*found) if found else set()


class Sources:
    """Chooses what to read every kind of state from, and collects what to say about it.

    Args:
        fresh: Kinds of state that may be missing.
        momentum_from_adam: Whether Adam's first moment serves as momentum where there is none.
    """

    def __init__(self, fresh: Collection[str], momentum_from_adam: bool) -> None:
        self._fresh = frozenset(fresh)
        self._momentum_from_adam = momentum_from_adam
        self._missing: list[str] = []
        self._notes: dict[str, list[str]] = {}

    def choose(self, name: str, wanted: Collection[str], there: Collection[str]) -> dict[str, str]:
        """Return the kind of state in the checkpoint to read each kind from, if there is one.

        Args:
            name: The parameter.
            wanted: Kinds of state that it has now.
            there: Kinds of state that the checkpoint has of it.
        """
        chosen = {key: key for key in wanted if key in there}
        if MAIN in wanted and MAIN not in chosen:
            if MAIN_OF_PLAIN in there:
                chosen[MAIN] = MAIN_OF_PLAIN
            else:
                self._note("main weights are those of the model", name)
        # steps are also counted for all parameters together
        kept = set(wanted) - {MAIN, STEP}
        others = set(there) - {MAIN, MAIN_OF_PLAIN, STEP}
        another_optimizer = bool(others) and not others & kept
        for key in sorted(kept - set(chosen)):
            if key == MOMENTUM and self._momentum_from_adam and FIRST_MOMENT in there:
                chosen[key] = FIRST_MOMENT
                self._note(f"{key} is taken from {FIRST_MOMENT}", name)
            elif another_optimizer or key in self._fresh:
                has = ", ".join(sorted(others)) or "none"
                self._note(f"{key} starts fresh (the checkpoint has: {has})", name)
            else:
                self._missing.append(f"{name}: {key}")
        return chosen

    def check(self) -> None:
        """Raise if state is missing that nobody said may be.

        Raises:
            ConfigurationError: With the parameters and what they lack.
        """
        if self._missing:
            kinds = sorted({item.rpartition(": ")[2] for item in self._missing})
            raise ConfigurationError(
                "checkpoint",
                _shorten(self._missing),
                "must hold this state of the optimizer, and does not",
                "Load a checkpoint of this optimizer, or say what may start fresh: "
                f"--checkpoint-fresh-state {' '.join(kinds)} (checkpoint_fresh_state={kinds})",
            )

    def lines(self) -> list[str]:
        """Return what differs from the checkpoint, a line for each difference."""
        return [
            f"{note}: {len(names)} parameter(s): {_shorten(names)}"
            for note, names in self._notes.items()
        ]

    def _note(self, note: str, name: str) -> None:
        self._notes.setdefault(note, []).append(name)


def _shorten(names: list[str]) -> str:
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
