"""Errors, names and version probes that everything else may use."""
