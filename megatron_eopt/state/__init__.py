"""State in checkpoints of any format: whose it is, and what a load takes."""
