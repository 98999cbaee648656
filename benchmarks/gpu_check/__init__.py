"""Test and benchmark the package on GPUs, with one command."""
