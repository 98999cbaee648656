"""What the rest of the package works without: nothing imports it until a setting asks for it.

Whoever changes a module here reads only the hook that calls it: ``optimizers.step_checks``.
"""
