"""What a checkpoint's metadata tells."""
