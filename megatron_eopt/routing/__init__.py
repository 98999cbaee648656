"""Routing: which parameter gets which optimizer, with which settings, and why."""
