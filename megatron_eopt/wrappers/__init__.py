"""Build an optimizer from a configuration and a model: resolve, route, choose storage, build.

Whoever changes one storage reads ``storage`` for what shards are, and no other storage.
"""
