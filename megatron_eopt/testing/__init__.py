"""Tests of optimizers and storages, and the processes in which they run."""
