"""QK-clip: scales down query and key weights whose attention logits exceed a threshold.

From the Kimi K2 report (arXiv:2507.20534), with the rules of megatron-core's ``clip_qk``.
Whoever changes the rules reads of other rooms only ``storage``.
"""

from megatron_eopt.qk_clip.attention import prepare
from megatron_eopt.qk_clip.clip import clip_qk, remember

__all__ = ["clip_qk", "prepare", "remember"]
