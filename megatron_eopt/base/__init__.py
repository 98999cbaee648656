"""Errors, shared names, rank agreement and upstream lookups that all other packages use.

Whoever changes how ranks agree, or adapts a lookup to another release, reads no other room.
"""
