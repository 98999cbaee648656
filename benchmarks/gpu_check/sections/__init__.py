"""The sections of the check, one module each, whose ``run`` returns an outcome."""
