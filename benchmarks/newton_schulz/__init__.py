"""How fast we orthogonalize: ours against emerging-optimizers, alternating in one run."""
