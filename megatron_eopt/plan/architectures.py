"""Shapes of decoder-only language models, in Megatron's words.

All that decides weights is here, with these choices made: norms are RMSNorm, positions are rotary,
and no linear layer has a bias except, if asked for, that of Q, K and V. Layers that predict further
tokens are left out.
"""

from dataclasses import dataclass, fields

from megatron_eopt.base.errors import ConfigurationError, check_number

__all__ = ["PUBLISHED", "SEQ_LENGTH", "Architecture", "Experts", "LatentAttention"]

SEQ_LENGTH = 4096
"""Tokens of a sequence where nothing says otherwise."""


@dataclass(frozen=True)
class LatentAttention:
    """Multi-latent attention: queries, and keys with values, come from vectors of low rank.

    Attributes:
        q_lora_rank: Rank of the queries; None if they are projected at once.
        kv_lora_rank: Rank of keys and values.
        qk_head_dim: Part of a head's query and key that has no position.
        qk_pos_emb_head_dim: Part that has; all heads share the key's.
        v_head_dim: Size of a head's value.

    Raises:
        ConfigurationError: If a size is below 1.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        _check_sizes(self)


@dataclass(frozen=True)
class Experts:
    """The layers with a mixture of experts.

    Attributes:
        num_moe_experts: Routed experts of a layer.
        moe_ffn_hidden_size: Inner size of one.
        moe_router_topk: How many of them a token passes.
        moe_shared_expert_intermediate_size: Inner size of all shared experts together; None if
            there are none.
        moe_layer_freq: Every how manieth layer has experts, from the first on; or 1 for each layer
            that has them and 0 for each dense one.

    Raises:
        ConfigurationError: If a size is below 1, or a token passes more experts than there are.
    """

    num_moe_experts: int
    moe_ffn_hidden_size: int
    moe_router_topk: int
    moe_shared_expert_intermediate_size: int | None = None
    moe_layer_freq: int | tuple[int, ...] = 1

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.moe_router_topk > self.num_moe_experts:
            rule = f"must be at most the {self.num_moe_experts} experts"
            raise ConfigurationError("moe_router_topk", self.moe_router_topk, rule, "Lower it")


@dataclass(frozen=True)
class Architecture:
    """A decoder-only language model.

    Attributes:
        name: For people.
        num_layers: Transformer layers.
        hidden_size: Size of a token's vector.
        ffn_hidden_size: Inner size of a dense MLP.
        num_attention_heads: Heads of the queries.
        num_query_groups: Heads of keys, and of values; without meaning if attention is latent.
        kv_channels: Size of a head; without meaning if attention is latent.
        vocab_size: Rows of the embedding, padding included.
        gated: Whether MLPs are gated (SwiGLU).
        untied: Whether the output layer has a weight of its own.
        add_qkv_bias: Whether Q, K and V have biases.
        qk_layernorm: Whether queries and keys are normalized; if attention is latent, its latent
            vectors.
        latent: Multi-latent attention, if it has that.
        experts: Mixtures of experts, if it has them.
        seq_length: Tokens of a sequence in training. No weight depends on it.

    Raises:
        ConfigurationError: If a size is below 1, or two do not go together.
    """

    name: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    gated: bool = True
    untied: bool = True
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    latent: LatentAttention | None = None
    experts: Experts | None = None
    seq_length: int = SEQ_LENGTH

    def __post_init__(self) -> None:
        _check_sizes(self)
        if self.num_attention_heads % self.num_query_groups:
            rule = f"must divide the {self.num_attention_heads} attention heads"
            way_out = "Give each group equally many heads"
            raise ConfigurationError("num_query_groups", self.num_query_groups, rule, way_out)
        if self.latent and self.add_qkv_bias:
            rule = "has no meaning with multi-latent attention, which has no biases"
            raise ConfigurationError("add_qkv_bias", True, rule, "Leave one of them out")
        if self.experts:
            self._check_frequency(self.experts.moe_layer_freq)

    def _check_frequency(self, value: int | tuple[int, ...]) -> None:
        if isinstance(value, int):
            return
        rule = f"must be a number, or {self.num_layers} times 0 or 1, not all of them 0"
        if len(value) != self.num_layers or not set(value) <= {0, 1} or not any(value):
            way_out = "Give one number for each layer"
            raise ConfigurationError("moe_layer_freq", value, rule, way_out)

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        if self.experts is None:
            return (False,) * self.num_layers
        every = self.experts.moe_layer_freq
        if isinstance(every, int):
            return tuple(layer % every == 0 for layer in range(self.num_layers))
        return tuple(map(bool, every))

    @property
    def total_parameters(self) -> int:
        """Parameters of the model: a tied embedding counts once."""
        embeddings = (2 if self.untied else 1) * self.vocab_size * self.hidden_size
        vectors = self.num_layers * self._vectors() + self.hidden_size
        experts = self.experts.num_moe_experts if self.experts else 0
        return embeddings + vectors + self._matrices(experts)

    @property
    def active_parameters(self) -> int:
        """Elements of the matrices that one token is multiplied by in a forward pass.

        The output layer is among them, tied or not; the embedding, which is looked up, is not. Of
        the routed experts those count that a token passes.
        """
        experts = self.experts.moe_router_topk if self.experts else 0
        return self.vocab_size * self.hidden_size + self._matrices(experts)

    def _matrices(self, experts: int) -> int:
        """Return the elements of all layers' matrices, with ``experts`` routed ones in a layer."""
        with_experts = sum(self.moe_layers)
        dense = (self.num_layers - with_experts) * self._mlp(self.ffn_hidden_size)
        mixed = with_experts * self._mixture(experts)
        return self.num_layers * self._attention() + dense + mixed

    def _attention(self) -> int:
        heads, hidden, latent = self.num_attention_heads, self.hidden_size, self.latent
        if latent is None:
            return 2 * hidden * self.kv_channels * (heads + self.num_query_groups)
        query = heads * (latent.qk_head_dim + latent.qk_pos_emb_head_dim)
        rank = latent.q_lora_rank
        queries = hidden * query if rank is None else rank * (hidden + query)
        keys = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
        values = latent.kv_lora_rank * heads * (latent.qk_head_dim + latent.v_head_dim)
        return queries + keys + values + heads * latent.v_head_dim * hidden

    def _mlp(self, inner: int) -> int:
        return (3 if self.gated else 2) * self.hidden_size * inner

    def _mixture(self, routed: int) -> int:
        if self.experts is None:
            return 0
        router = self.experts.num_moe_experts * self.hidden_size
        shared = self.experts.moe_shared_expert_intermediate_size or 0
        return router + routed * self._mlp(self.experts.moe_ffn_hidden_size) + self._mlp(shared)

    def _vectors(self) -> int:
        """Return the elements of one layer's norms and biases."""
        found = 2 * self.hidden_size
        if self.qk_layernorm and self.latent:
            found += (self.latent.q_lora_rank or 0) + self.latent.kv_lora_rank
        elif self.qk_layernorm:
            found += 2 * self.kv_channels
        if self.add_qkv_bias:
            found += self.kv_channels * (self.num_attention_heads + 2 * self.num_query_groups)
        return found


def _check_sizes(shape: Architecture | Experts | LatentAttention) -> None:
    for field in fields(shape):
        value = getattr(shape, field.name)
        if isinstance(value, int) and not isinstance(value, bool):
            check_number(field.name, value, at_least=1)


def _llama(name: str, layers: int, hidden: int, inner: int, heads: int) -> Architecture:
    return Architecture(name, layers, hidden, inner, heads, 8, 128, 128256, seq_length=8192)


def _qwen3(
    name: str, layers: int, hidden: int, inner: int, heads: int, experts: Experts
) -> Architecture:
    return Architecture(
        name, layers, hidden, inner, heads, 4, 128, 151936, qk_layernorm=True, experts=experts
    )


def _deepseek(name: str, heads: int, vocabulary: int, experts: int, dense: int) -> Architecture:
    """Return a model whose first layers are ``dense``."""
    return Architecture(
        name,
        61,
        7168,
        18432,
        heads,
        heads,
        128,
        vocabulary,
        qk_layernorm=True,
        latent=LatentAttention(1536, 512, 128, 64, 128),
        experts=Experts(experts, 2048, 8, 2048, (0,) * dense + (1,) * (61 - dense)),
    )


PUBLISHED: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (
        _llama("Llama-3-8B", 32, 4096, 14336, 32),
        _llama("Llama-3-70B", 80, 8192, 28672, 64),
        _llama("Llama-3-405B", 126, 16384, 53248, 128),
        _qwen3("Qwen3-30B-A3B", 48, 2048, 6144, 32, Experts(128, 768, 8)),
        _qwen3("Qwen3-235B-A22B", 94, 4096, 12288, 64, Experts(128, 1536, 8)),
        _deepseek("DeepSeek-V3", 128, 129280, 256, 3),
        _deepseek("Kimi-K2", 64, 163840, 384, 1),
    )
}
"""Models by name, as in config.json of meta-llama/Meta-Llama-3-8B and -70B,
meta-llama/Llama-3.1-405B, Qwen/Qwen3-30B-A3B and Qwen3-235B-A22B, deepseek-ai/DeepSeek-V3 and
moonshotai/Kimi-K2-Base; sequences as long as in pre-training before contexts are extended."""
