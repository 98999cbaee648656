"""What an optimizer of the plain storage asks a checkpoint of another optimizer for."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from megatron_eopt.assembly.plain.state import StoredState
from megatron_eopt.base.names import STATE_PREFIX
from megatron_eopt.storage.checkpoint.keys import keys
from megatron_eopt.storage.checkpoint.sources import MAIN, Index, Sources

__all__ = ["PlainRequests"]


class PlainRequests:
    """The requests of one sharded state dict, which :meth:`adapt` changes in place.

    Args:
        states: Entries by the parameter's number and the kind of state.
        mains: Entries of main weights by group and place.
        places: Group and place of the main weight of each number that has one.
        stored: How each parameter's state is written.

    Attributes:
        fresh: Once adapted, the kinds of state of each number that are not loaded; :data:`MAIN`
            among them means the main weight.
    """

    def __init__(
        self,
        states: dict[int, dict[str, Any]],
        mains: dict[int, dict[int, Any]],
        places: Mapping[int, tuple[int, int]],
        stored: Mapping[int, StoredState],
    ) -> None:
        self._states = states
        self._mains = mains
        self._places = places
        self._stored = stored
        self.fresh: dict[int, set[str]] | None = None
        self._own_keys = self.keys()

    def own_keys(self) -> set[str]:
        """Return the keys of all state that there is."""
        return self._own_keys

    def keys(self) -> set[str]:
        """Return the checkpoint's keys that are asked for now."""
        return keys([self._states, self._mains])

    def adapt(
        self, available: frozenset[str], fresh: Collection[str], momentum_from_adam: bool
    ) -> list[str]:
        """Ask only for what a checkpoint has.

        Arguments, result and errors are those of the distributed storage's
        :meth:`~megatron_eopt.storage.checkpoint.requests.StateRequests.adapt`.
        """
        index = Index(available, STATE_PREFIX)
        sources = Sources(fresh, momentum_from_adam)
        chosen = {}
        for number, item in self._stored.items():
            entries = self._states[number]
            there = index.kinds(item.shard.key) | {
                kind for kind, entry in entries.items() if keys([entry]) <= available
            }
            main = {MAIN} if number in self._places else set()
            chosen[number] = sources.choose(item.shard.key, {*entries, *main}, there)
        sources.check()
        self.fresh = {number: self._ask(number, kinds) for number, kinds in chosen.items()}
        return sources.lines()

    def _ask(self, number: int, chosen: Mapping[str, str]) -> set[str]:
        """Ask for the chosen kinds of state alone; return the others."""
        entries, key = self._states[number], self._stored[number].shard.key
        lacking = entries.keys() - chosen.keys()
        for kind in lacking:
            del entries[kind]
        for kind in entries:
            if chosen[kind] != kind:
                entries[kind] = replace(entries[kind], key=f"{STATE_PREFIX}{chosen[kind]}.{key}")
        if number in self._places:
            group, place = self._places[number]
            if MAIN in chosen:
                entry = self._mains[group][place]
                self._mains[group][place] = replace(
                    entry, key=f"{STATE_PREFIX}{chosen[MAIN]}.{key}"
                )
            else:
                del self._mains[group][place]
                lacking = {*lacking, MAIN}
        return set(lacking)
