"""What is planned before anything is trained: a model's shape, and its stages on a layout."""
