"""Where the time of a step and of an iteration goes, ours and the peer's."""

import os

# torch's profiler writes lines to standard error unless this is set before torch is loaded
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
