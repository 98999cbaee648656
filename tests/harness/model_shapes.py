"""Logical matrices of published models: what Muon orthogonalizes, embeddings and output left out.

In the order of the layers. Shapes (out, in) follow the models' published configurations
(config.json of meta-llama/Meta-Llama-3-8B and -70B, Qwen/Qwen3-30B-A3B, deepseek-ai/DeepSeek-V3);
fused weights are counted as their Q, K, V, gate and up matrices.
"""

type Shape = tuple[int, int]

__all__ = ["MODELS", "Shape"]


def _attention(hidden: int, head: int, heads: int, groups: int) -> list[Shape]:
    q, kv = heads * head, groups * head
    return [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]


def _gated(hidden: int, inner: int, experts: int = 1) -> list[Shape]:
    return experts * [(inner, hidden), (inner, hidden), (hidden, inner)]


def _llama_3_8b() -> list[Shape]:
    return 32 * (_attention(4096, 128, 32, 8) + _gated(4096, 14336))


def _llama_3_70b() -> list[Shape]:
    return 80 * (_attention(8192, 128, 64, 8) + _gated(8192, 28672))


def _qwen3_30b_a3b() -> list[Shape]:
    router = [(128, 2048)]
    return 48 * (_attention(2048, 128, 32, 4) + router + _gated(2048, 768, experts=128))


def _deepseek_v3() -> list[Shape]:
    hidden, heads, q_rank, kv_rank, nope, rope, value = 7168, 128, 1536, 512, 128, 64, 128
    attention = [
        (q_rank, hidden),
        (heads * (nope + rope), q_rank),
        (kv_rank + rope, hidden),
        (heads * (nope + value), kv_rank),
        (hidden, heads * value),
    ]
    moe = [(256, hidden), *_gated(hidden, 2048, experts=256 + 1)]
    return 3 * (attention + _gated(hidden, 18432)) + 58 * (attention + moe)


MODELS: dict[str, list[Shape]] = {
    "Llama-3-8B": _llama_3_8b(),
    "Llama-3-70B": _llama_3_70b(),
    "Qwen3-30B-A3B": _qwen3_30b_a3b(),
    "DeepSeek-V3": _deepseek_v3(),
}
