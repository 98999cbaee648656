"""Methods that replace upstream's can be called as upstream's are, and return the same kind."""

import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator
from typing import Any

import megatron_eopt

UPSTREAM = ("megatron.core", "torch.optim", "emerging_optimizers")
UNIONS = (typing.Union, types.UnionType)


def classes() -> list[type]:
    found: dict[type, None] = {}
    for module in pkgutil.walk_packages(megatron_eopt.__path__, "megatron_eopt."):
        if not module.name.endswith("__main__") and "triton" not in module.name:
            own = vars(importlib.import_module(module.name)).values()
            found |= {c: None for c in own if inspect.isclass(c) and c.__module__ == module.name}
    return list(found)


def overrides() -> Iterator[Any]:
    """Yield each function of ours beside the nearest one of upstream that it replaces."""
    for cls in classes():
        found: set[str] = {"__init__"}
        for above in (c for c in cls.__mro__ if c.__module__.startswith(UPSTREAM)):
            for name in (name for name in vars(above) if name not in found):
                ours, theirs = inspect.getattr_static(cls, name), vars(above)[name]
                found.add(name)
                mine = inspect.isfunction(ours) and ours.__module__.startswith("megatron_eopt")
                if mine and inspect.isfunction(theirs):
                    yield ours, theirs


def as_called(function: Any) -> inspect.Signature:
    return inspect.signature(inspect.unwrap(function))


def can_call(ours: Any, theirs: Any) -> bool:
    wanted = [p for p in as_called(theirs).parameters.values() if p.name != "self"]
    required = [p.name for p in wanted if p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    by_name = [p.name for p in wanted if p.kind in (1, 3)]
    try:
        for names in (required, by_name):
            as_called(ours).bind(None, **dict.fromkeys(names))
        as_called(ours).bind(None, *(None for p in wanted if p.kind in (0, 1)))
    except TypeError:
        return False
    return True


def test_upstream_can_call_it():
    found = [*overrides()]
    assert len(found) > 50
    assert not [pair for pair in found if not can_call(*pair)]


def kinds_returned(function: Any) -> set[Any]:
    """Return the classes that a function's annotation names; empty if it says nothing."""
    hint = typing.get_type_hints(inspect.unwrap(function)).get("return", Any)
    options = typing.get_args(hint) if typing.get_origin(hint) in UNIONS else (hint,)
    kinds = {typing.get_origin(option) or option for option in options}
    return kinds if all(map(inspect.isclass, kinds)) and Any not in kinds else set()


def test_it_returns_what_upstream_returns():
    for ours, theirs in overrides():
        mine, wanted = kinds_returned(ours), tuple(kinds_returned(theirs))
        if mine and wanted:
            assert all(issubclass(kind, wanted) for kind in mine), ours
