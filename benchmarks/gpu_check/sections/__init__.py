"""One module for each section of the check; its ``run`` returns an ``Outcome``."""
