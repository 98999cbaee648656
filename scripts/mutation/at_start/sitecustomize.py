"""Python imports this when a process starts: commands that a test runs are followed, too."""

import os

from scripts.mutation.lines import VARIABLE, follow

if log := os.environ.get(VARIABLE):
    follow(log)
