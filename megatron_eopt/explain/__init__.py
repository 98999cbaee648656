"""What a checkpoint holds, who wrote it, and where it can be loaded, from its metadata alone.

No tensor is read and no process group is needed. Objects are read with torch's ``weights_only``.
"""

from megatron_eopt.explain.contents import Contents, explain
from megatron_eopt.explain.tables import show, to_json

__all__ = ["Contents", "explain", "show", "to_json"]
