"""What a checkpoint holds, who wrote it, and where it can be loaded, from its metadata alone.

No tensor is read, no process group is needed, and nothing that a file names is called.
"""

from megatron_eopt.explain.contents import Contents, explain
from megatron_eopt.explain.tables import show, to_json

__all__ = ["Contents", "explain", "show", "to_json"]
