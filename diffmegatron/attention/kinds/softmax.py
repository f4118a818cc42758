"""softmax(Q K^T / sqrt(d)) V: the Transformer's attention, and the baseline of all kinds.

Q, K and V are [tokens, d] in each head, and d is ``head_dim``.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from typing_extensions import override

from diffmegatron.attention.kernels.costs import FLOAT32
from diffmegatron.errors import UserError

from . import hugging_face as hf
from .kind import AttentionKind, Kernels
from .layer import QKV_BIAS, Constant, Context, Heads, Layer, Parameter, Rows

if TYPE_CHECKING:
    from torch import Tensor

QK_NORMS = ("q_norm", "k_norm")


class Softmax(AttentionKind):
    """Softmax attention; ``num_heads / num_kv_heads`` query heads share a key-value head.

    ``qkv_bias`` adds a bias to queries, keys and values (Qwen2). ``qk_norm`` applies an RMSNorm to
    queries and keys before their rotation (Qwen3). ``headwise_norm`` applies an RMSNorm to each
    head's output (Ye et al., ICLR 2025, table 6).
    """

    kind: Literal["softmax"] = "softmax"
    qkv_bias: bool = False
    qk_norm: bool = False
    headwise_norm: bool = False

    title: ClassVar[str] = "Transformer"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "seed_oss")

    @property
    def heads(self) -> Heads:
        """Layout of Megatron-core: a block has the queries of one key, this key and its value."""
        queries = self.num_heads // self.num_kv_heads
        rows: Rows = (("q", queries), ("k", 1), ("v", 1))
        return Heads(self.head_dim, self.num_kv_heads, rows, queries)

    @override
    def baseline(self) -> "Softmax":
        return self

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the bias of ``linear_qkv`` and the weights of the norms, if configured."""
        d, own = (self.head_dim,), []
        if self.qkv_bias:
            channels = (self.heads.qkv_channels,)
            own.append(Parameter(QKV_BIAS, channels, Constant(0.0), "bias", sharded=True))
        if self.qk_norm:
            own += [Parameter(name, d, Constant(1.0), "norm") for name in QK_NORMS]
        if self.headwise_norm:
            own.append(Parameter("head_norm", d, Constant(1.0), "norm", float32=True))
        return tuple(own)

    @override
    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        heads, element, is_unfused = self.heads, kernels.element, kernels.device == "cpu"
        is_narrow = element < FLOAT32
        inputs, core = kernels.softmax_bytes(heads)
        if self.qk_norm:
            # The norms save a float32 per head. On a CPU they also save their normalised input in
            # float32, and in bf16 runs a float32 copy of their input.
            inputs += FLOAT32 * (heads.queries + heads.keys)
            if is_unfused:
                channels = heads.query_channels + heads.key_channels
                inputs += FLOAT32 * channels * (2 if is_narrow else 1)
        if self.headwise_norm:
            # The output projection saves the norm's output, so the kernel's output is an additional
            # tensor. The norm saves a float32 per head, and its input in float32 if the kernel's
            # output is narrower. On a CPU it also saves its normalised input.
            core += element * heads.query_channels + FLOAT32 * heads.queries
            core += FLOAT32 * heads.query_channels * (is_narrow + is_unfused)
        return inputs + element * heads.query_channels, core

    @override
    def normalize_qk(self, layer: Layer, query: "Tensor", key: "Tensor") -> "tuple[Tensor, Tensor]":
        if not self.qk_norm:
            return query, key
        from torch.nn.functional import rms_norm

        shape, eps = (self.head_dim,), layer.norm_eps
        q_norm, k_norm = (layer.parameter(name) for name in QK_NORMS)
        return rms_norm(query, shape, q_norm, eps), rms_norm(key, shape, k_norm, eps)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        """Return softmax(Q K^T / sqrt(d)) V of this rank's heads, [b, s, heads, d].

        With ``headwise_norm``, return RMSNorm(softmax(Q K^T / sqrt(d)) V).
        """
        heads = context.softmax_attention(query, key, value)
        if not self.headwise_norm:
            return heads
        from diffmegatron.attention.kernels.api import HeadwiseNorm

        norm = HeadwiseNorm(layer.parameter("head_norm"), layer.norm_eps, 1.0)
        # The axis order [s, b, ...] determines the last bits of the gradient of the norm's weight.
        # Earlier versions had this order, and their runs must resume to the same numbers.
        return norm.apply_to(heads.transpose(0, 1)).transpose(0, 1)

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return Hugging Face's class Qwen3, SeedOss, Mistral or Llama, and its configuration keys.

        With ``qkv_bias`` the class is SeedOss. Qwen2 has the same biases, but transformers 5 loads
        Qwen's own tokenizer for every Qwen2 model.
        """
        if self.headwise_norm:
            raise UserError(
                f"model.attention.headwise_norm True with kind {self.kind!r} cannot be exported: "
                "Hugging Face's Llama never has the headwise norm"
            )
        if self.qkv_bias and self.qk_norm:
            raise UserError(
                "model.attention.qkv_bias True with model.attention.qk_norm True cannot be "
                "exported: Hugging Face's SeedOss has the one and Qwen3 the other"
            )
        config = hf.head_keys(self.heads)
        if self.qkv_bias:
            if self.num_heads * self.head_dim == hidden_size:
                # Qwen2's config.json usually omits this default width. Omit it too, so that the
                # export of an imported Qwen2 keeps its config.json.
                del config["head_dim"]
            fixed = {
                "head_dim": self.head_dim,
                "attention_bias": True,
                "attention_out_bias": False,
                "attention_dropout": 0.0,
                "residual_dropout": 0.0,
            }
            return hf.HuggingFace(
                "seed_oss", "SeedOssForCausalLM", config, fixed=fixed, also=("qwen2",)
            )
        if self.qk_norm:
            return hf.HuggingFace("qwen3", "Qwen3ForCausalLM", config)
        if hidden_size % self.num_heads:
            # Llama's configuration requires that the number of heads divides the hidden size.
            whole = {"sliding_window": None}
            return hf.HuggingFace("mistral", "MistralForCausalLM", config | whole)
        return hf.HuggingFace("llama", "LlamaForCausalLM", config, also=("mistral",))

    @classmethod
    @override
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        return cls(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or 0,
            qkv_bias=config["model_type"] in ("qwen2", "seed_oss"),
            qk_norm=config["model_type"] == "qwen3",
        )

    @override
    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[hf.WeightRule]:
        rules = [hf.qkv(ours, theirs, self.heads, hidden_size)]
        if self.qkv_bias:
            rules.append(hf.qkv_bias(ours, theirs, self.heads))
        if self.qk_norm:
            rules += [
                hf.same(f"{ours}.{name}", f"{theirs}.{name}.weight", (self.head_dim,))
                for name in QK_NORMS
            ]
        return [*rules, hf.output(ours, theirs, self.heads, hidden_size)]
