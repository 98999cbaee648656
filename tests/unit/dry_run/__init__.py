"""Runs of the optimizer as one rank of many, without data."""
