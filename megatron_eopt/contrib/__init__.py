"""What the rest of the package works without: nothing imports it until a setting asks for it."""
