"""Configuration classes, the registry of optimizers, and the checks of every setting.

A configuration is resolved once into ``Settings``; other packages read only these. Whoever adds a
setting or a bound reads besides only the code that uses it.
"""
