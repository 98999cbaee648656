"""The state of a chain of optimizers as dist_checkpointing saves and loads it."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_eopt.base.agreement import agreed, any_rank, is_rank_0, of_every_rank
from megatron_eopt.base.errors import ConfigurationTypeError
from megatron_eopt.base.names import FIRST_MOMENT, STEP
from megatron_eopt.checkpoint.groups import (
    Groups,
    adopt,
    optimizers_of,
    saved_groups,
    saved_scaler,
    saved_steps,
    steps_of,
)
from megatron_eopt.checkpoint.requests import Form, Lacking, StateRequests
from megatron_eopt.optimizers.driver import Driver, set_step
from megatron_eopt.optimizers.member import Member

logger = logging.getLogger(__name__)

REQUESTS = "requests"
"""Key of the requests in a sharded state dict that is about to be loaded."""

_PARAM_STATE = "param_state"

type TakeT = Callable[[], Sequence[Lacking]]
"""Takes over what was checked; returns what is to begin anew, see :func:`begin_anew`."""


def requested(
    members: Sequence[Member], model_state: Mapping[str, Any], form: Form, *, is_loading: bool
) -> dict[Any, Any]:
    """Return what ``dist_checkpointing`` saves or loads of a chain; collective.

    Raises:
        ConfigurationError: If a parameter is not in the model's state.
    """
    prepare(members, is_loading=is_loading)
    counts = None if is_loading else counts_of(members)
    requests = agreed(lambda: StateRequests(members, model_state, form, counts))
    requests.separate()
    result = common_state(members, form.main, counts)
    result[_PARAM_STATE] = requests.param_state
    if is_loading:
        result[REQUESTS] = LocalNonpersistentObject(requests)
    return result


def prepare(members: Sequence[Member], *, is_loading: bool) -> None:
    """Make all state exist that can be saved, or is about to be loaded."""
    for member in members:
        for driver in member.drivers:
            with member.scene(driver) as work:
                (driver.expect if is_loading else driver.init)(*work)


def settle(members: Sequence[Member]) -> None:
    """Let all state that was loaded be as it is kept between steps; collective."""
    for member in members:
        for driver in member.drivers:
            with member.scene(driver) as work:
                driver.pack(*work)


def counts_of(members: Sequence[Member]) -> dict[Driver, int]:
    """Return the steps that each driver's states count, -1 for one that counts none; collective."""
    mine: dict[tuple[int, str], int] = {}
    keys = {}
    for number, member in enumerate(members):
        for driver in member.drivers:
            keys[driver] = number, driver.name
            with member.scene(driver) as (groups, state):
                steps = [int(found[STEP]) for found in driver.counting(groups, state)]
            mine[keys[driver]] = max([*steps, mine.get(keys[driver], -1)])
    # a rank may have none of a driver's states, or not even the driver
    known = of_every_rank(mine)
    return {driver: max(counts.get(key, -1) for counts in known) for driver, key in keys.items()}


def common_state(
    members: Sequence[Member], main: str | None = None, counts: Mapping[Driver, int] | None = None
) -> dict[Any, Any]:
    """Return what is the same on all ranks: groups, steps as ``counts_of`` says, and loss scale."""
    states: list[dict[Any, Any]] = []
    for member in members:
        steps = [
            (counts or {}).get(driver, -1)
            for driver in member.drivers
            for _ in member.groups_of(driver)
        ]
        stub = member.storage.is_stub_optimizer
        states.append({} if stub else member.storage.common_state(steps, main))
    return states[0] if len(states) == 1 else dict(enumerate(states))


@torch.no_grad()
def begin_anew(members: Sequence[Member], lacking: Sequence[Lacking]) -> None:
    """Let what was not loaded be as in an optimizer that has not stepped; collective."""
    if not any_rank(bool(lacking)):
        return
    kept = [
        (state, {kind: value for kind, value in state.items() if kind not in kinds})
        for state, kinds in lacking
    ]
    for state, _ in lacking:
        state.clear()
    for driver in (driver for member in members for driver in member.drivers):
        driver.forget(())
    prepare(members, is_loading=True)
    for state, values in kept:
        state.update(values)


def load(members: Sequence[Member], state: Mapping[Any, Any]) -> TakeT:
    """Check what was loaded for :func:`requested`; return what takes it over.

    Groups match by identity, and keep the present run's settings of their schedule. Main weights
    that the checkpoint does not have are taken from the model, which must be loaded before.

    Raises:
        ConfigurationError: If state is missing.
        ConfigurationTypeError: If state was loaded that nobody has asked for.
    """
    requests, param_state = state.get(REQUESTS), state.get(_PARAM_STATE)
    if param_state is not None and not isinstance(requests, StateRequests):
        raise ConfigurationTypeError(
            f"state_dict[{REQUESTS!r}]",
            requests,
            "must be what sharded_state_dict(..., is_loading=True) has put there",
            "Pass what dist_checkpointing.load returned for that, whole",
        )
    # groups and scale that lie with buckets count as one more optimizer's each
    by_bucket = (param_state or {}).get("buckets", {})
    known = {**state, **{len(members) + int(n): part for n, part in by_bucket.items()}}
    if requests is not None and param_state is not None:
        requests.check(param_state)

    def take() -> Sequence[Lacking]:
        has_stepped = any(member.storage.steps for member in members)
        adopt_common(members, known)
        apart, lacking = [], []
        if requests is not None and param_state is not None:
            apart, lacking = requests.take(param_state)
        set_all_steps(members, known)
        for values, steps in apart:
            set_step(values, steps)
        return lacking if has_stepped else ()

    return take


def set_all_steps(members: Sequence[Member], state: Mapping[Any, Any]) -> None:
    """Let every counter of steps say what the same groups of a checkpoint have done."""
    saved = saved_groups(state)
    for member in members:
        for driver in member.drivers:
            with member.scene(driver) as (groups, values):
                steps = steps_of(groups, saved, member.storage.steps)
                driver.set_steps(groups, values, steps)


def _tell_of_others(members: Sequence[Member], saved: Groups) -> None:
    """Log that a kind of state may have meant something else to the optimizer that wrote it."""
    inner = [m.storage.optimizer for m in members if not m.storage.is_stub_optimizer]
    before = optimizers_of(saved)
    groups = [(optimizer, group) for optimizer in inner for group in optimizer.param_groups]
    present = optimizers_of([group for _, group in groups])
    # Adam steps what is no matrix in most runs, so that it is seldom gone
    averaging = optimizers_of(
        [
            group
            for optimizer, group in groups
            if any(FIRST_MOMENT in optimizer.state.get(p, ()) for p in group["params"])
        ]
    )
    changed = (before - present) | (averaging - before)
    if None not in before and changed and is_rank_0():
        logger.warning(
            "the checkpoint is of the optimizers %s, and this run has %s: state of a kind that "
            "both have (exp_avg, ...) goes on as it is, though %s may have meant something else "
            "by it; --no-load-optim starts all anew",
            *(", ".join(sorted(map(str, names))) for names in (before, present, changed)),
        )


def adopt_common(members: Sequence[Member], state: Mapping[Any, Any]) -> None:
    """Take over groups, steps and loss scale, wherever another chain of optimizers has put them."""
    saved, steps = saved_groups(state), saved_steps(state)
    scaler = saved_scaler(state)
    _tell_of_others(members, saved)
    for member in members:
        if member.storage.is_stub_optimizer:
            continue
        for group in member.storage.optimizer.param_groups:
            adopt(group, saved)
        member.storage.steps = steps
        if member.storage.grad_scaler and scaler is not None:
            member.storage.grad_scaler.load_state_dict(scaler)
