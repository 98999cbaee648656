"""What a run asked for: configurations, the optimizers there are, and all checks of a value.

A configuration is resolved once, into :class:`Settings`; nothing above reads one.
"""
