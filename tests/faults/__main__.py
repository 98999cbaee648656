"""Tell which faults the tests do not notice: ``python -m tests.faults --help``."""

import sys

from tests.faults.trial import main

if __name__ == "__main__":
    sys.exit(main())
