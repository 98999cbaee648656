"""Support for what few use: import a module of it, and the model's optimizer can be built."""
