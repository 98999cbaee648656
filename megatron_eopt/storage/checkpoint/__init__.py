"""State of fragments and whole matrices in checkpoints that know nothing of the run's layout."""
