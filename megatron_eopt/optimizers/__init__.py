"""The optimizers: torch classes, and update rules that run them on sharded parameters.

An algorithm is one file, whose author reads ``storage`` for what a shard is, and no storage.
"""
