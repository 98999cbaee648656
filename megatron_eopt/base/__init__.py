"""Errors, shared names, rank agreement and upstream lookups that all other packages use."""
