"""Routing: which parameter gets which optimizer, with which settings, and why.

Whoever teaches it another model's modules reads besides only ``matrices``, for fused weights.
"""
