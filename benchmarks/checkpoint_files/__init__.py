"""What verifying the files of checkpoints costs."""
