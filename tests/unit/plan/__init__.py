"""Shapes of models, where they are read from, and their stages."""
