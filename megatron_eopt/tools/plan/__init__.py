"""Predict memory, communication and time of an optimizer step, without GPUs.

Whoever changes models, machines or tables reads besides only the reports of ``dry_run``.
"""
