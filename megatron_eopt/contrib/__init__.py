"""What the rest of the package works without, and imports by its name alone where it is asked for.

Whoever changes a module here reads only the hook that calls it: ``routing.fused`` that of
``transformers``.
"""
