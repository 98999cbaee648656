"""Errors, names and what is needed of upstream, for everything else."""
