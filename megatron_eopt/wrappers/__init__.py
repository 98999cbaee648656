"""Build an optimizer from a configuration and a model: resolve, route, choose storage, build."""
