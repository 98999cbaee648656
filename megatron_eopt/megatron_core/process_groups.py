"""The model's process groups."""

from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import distributed

from megatron_eopt.base.errors import ConfigurationError


def process_groups(pg_collection: Any) -> Any:
    """Return the caller's collection of process groups, or Megatron's.

    A collection may lack the tensor-parallel group if all its groups have the ranks of Megatron's.

    Raises:
        ConfigurationError: If that group is missing, and another one differs from Megatron's or
            Megatron has none yet.
    """
    if pg_collection is not None and getattr(pg_collection, "tp", None) is not None:
        return pg_collection
    if not parallel_state.model_parallel_is_initialized():
        rule = "Megatron's process groups do not exist yet"
        hint = "Call megatron.core.parallel_state.initialize_model_parallel before, or pass groups"
        raise ConfigurationError("pg_collection", pg_collection, rule, hint)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    # the tensor-parallel group is taken from Megatron's global state, which must describe the same
    # job
    for name, group in vars(pg_collection or collection).items():
        if _ranks(group) != _ranks(getattr(collection, name, None)):
            rule = f"is required because {name} differs from Megatron's own group"
            hint = "Add it, or pass pg_collection=None to use Megatron's own groups"
            raise ConfigurationError("pg_collection.tp", None, rule, hint)
    return collection


def _ranks(group: Any) -> list[int] | None:
    is_group = isinstance(group, distributed.ProcessGroup)
    return distributed.get_process_group_ranks(group) if is_group else None
