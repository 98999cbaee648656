"""One command for a GPU machine: what was only ever seen on CPUs is checked and measured there."""
