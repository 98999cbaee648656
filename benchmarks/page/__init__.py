"""Writes docs/benchmarks.md, all of it, from the figures beside it."""
