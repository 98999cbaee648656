"""Held-out losses of the quickstart with momentum in fewer bits, against float32's."""
