"""QK-clip: query and key weights shrink where attention logits have grown past a threshold.

From the report of Kimi K2 (arXiv:2507.20534), with the rules of megatron-core's ``clip_qk``.
"""

from megatron_eopt.qk_clip.attention import prepare
from megatron_eopt.qk_clip.clip import clip_qk, remember

__all__ = ["clip_qk", "prepare", "remember"]
