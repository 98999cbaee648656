"""Test harness: worker processes over gloo, and small models of real megatron-core parts.

A test gives :func:`run_ranks` a module-level function; every rank calls it and returns its result.
"""

from tests.harness.pool import RankError, RankTimeoutError, close_pools, run_ranks

__all__ = ["RankError", "RankTimeoutError", "close_pools", "run_ranks"]
