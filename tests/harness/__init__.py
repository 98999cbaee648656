"""Test harness: small models of real megatron-core parts, and the package's worker processes.

A test gives :func:`run_ranks` a module-level function; every rank calls it and returns its result.
"""

from megatron_eopt.testing.pool import RankError, RankTimeoutError, close_pools, run_ranks

__all__ = ["RankError", "RankTimeoutError", "close_pools", "run_ranks"]
