"""From a configuration and a model to an optimizer: resolve, route, store, build."""
