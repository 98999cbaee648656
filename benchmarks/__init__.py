"""Benchmarks. Run a module with ``python -m``; it prints a table and writes JSON or plots."""
