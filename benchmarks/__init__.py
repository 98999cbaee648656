"""Measurements: each module is run with python -m and writes a table, a plot and JSON."""
