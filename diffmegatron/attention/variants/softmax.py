"""softmax(Q K^T / sqrt(d)) V: the Transformer's attention, and the baseline of all variants."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from typing_extensions import override

from diffmegatron.attention.kernels.registry import SOFTMAX
from diffmegatron.attention.variants import hugging_face as hf
from diffmegatron.attention.variants.base import (
    FLOAT32,
    QKV_BIAS,
    Constant,
    Context,
    Kernels,
    Layer,
    Parameter,
    Variant,
)
from diffmegatron.attention.variants.projection_heads import Heads, Rows
from diffmegatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

QK_NORMS = ("q_norm", "k_norm")
# Keys that every exported SeedOss configuration has. The dropouts are 0, because SeedOss applies
# them by default.
_SEED_OSS = {
    "attention_bias": True,
    "attention_out_bias": False,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,
}


class Softmax(Variant):
    """Softmax attention; ``num_heads / num_kv_heads`` query heads share a key-value head.

    ``qkv_bias`` adds a bias to queries, keys and values, as in Qwen2 and Qwen2.5. ``qk_norm``
    applies an RMSNorm to each query and each key before their rotation, as in Qwen3.
    ``headwise_norm`` applies an RMSNorm to each head's output, an ablation in the paper of the
    Differential Transformer (Ye et al., table 6).
    """

    kind: Literal["softmax"] = "softmax"
    qkv_bias: bool = False
    qk_norm: bool = False
    headwise_norm: bool = False

    title: ClassVar[str] = "Transformer"
    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "seed_oss")

    @property
    def heads(self) -> Heads:
        """Layout of the heads in ``linear_qkv``, as in Megatron-core.

        Each block of rows has the query heads that share a key head, then this key head, then its
        value head.
        """
        queries = self.num_heads // self.num_kv_heads
        rows: Rows = (("q", queries), ("k", 1), ("v", 1))
        return Heads(self.head_dim, self.num_kv_heads, rows, queries)

    def baseline(self) -> "Softmax":
        """Return this variant itself."""
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

    def products(self) -> int:
        """Return the multiply-adds per (query, key) pair: ``2 * head_dim`` for each query head."""
        return 2 * self.heads.query_channels

    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        """Return the bytes per token that a layer saves for the backward pass.

        :meth:`.base.Variant.saved_bytes` defines the two numbers.
        """
        heads, element, backend = self.heads, kernels.element, SOFTMAX[kernels.backend]
        queries = element * heads.query_channels
        projected = 2 * queries + kernels.softmax_keys(heads, backend)
        core: float = FLOAT32 * heads.queries
        if kernels.communication is None:
            # v is a view of the output of the fused q, k and v projection. The view keeps the whole
            # output in memory, so the unrotated q and k are counted in addition to the rotated
            # ones.
            projected += queries + element * heads.key_channels
        if self._copies_output(kernels):
            # `projected` counts the input of the output projection. This input is usually the
            # kernel's output. Here it is a copy, and both tensors stay in memory.
            core += queries
        if self.qk_norm:
            projected += self._qk_norm_bytes(kernels)
        if self.headwise_norm:
            core += self._norm_bytes(kernels)
        return projected, core

    @staticmethod
    def _copies_output(kernels: Kernels) -> bool:
        """Return whether the kernel's output is copied before the next operation."""
        if kernels.communication in ("all_gather", "ulysses"):
            return True
        return kernels.has_mask and SOFTMAX[kernels.backend].saves_bias

    def _qk_norm_bytes(self, kernels: Kernels) -> float:
        """Return the bytes per token that the norms of queries and keys save.

        The norms save one float32 per query head and per key head. On a CPU they are not fused and
        also save their normalised input in float32. In bf16 runs on a CPU they save a float32 copy
        of their input as well.
        """
        heads = self.heads
        kept = FLOAT32 * (heads.queries + heads.keys)
        if kernels.device == "cpu":
            copies = 1 if kernels.element == FLOAT32 else 2
            kept += copies * FLOAT32 * (heads.query_channels + heads.key_channels)
        return kept

    def _norm_bytes(self, kernels: Kernels) -> float:
        """Return the bytes per token that the headwise norm adds.

        The norm saves one float32 per head and its input in float32. In float32 runs this input is
        the attention kernel's output, which ``saved_bytes`` already counts. On a CPU the norm also
        saves its normalised input in float32. The norm's output is counted too, because the output
        projection saves it.
        """
        channels = self.heads.query_channels
        copy = 0 if kernels.element == FLOAT32 else FLOAT32 * channels
        normalised = FLOAT32 * channels if kernels.device == "cpu" else 0
        return copy + kernels.element * channels + FLOAT32 * self.num_heads + normalised

    @override
    def normalize_qk(self, layer: Layer, query: "Tensor", key: "Tensor") -> "tuple[Tensor, Tensor]":
        if not self.qk_norm:
            return query, key
        from torch.nn.functional import rms_norm

        normed = (
            rms_norm(x, (self.head_dim,), layer.parameter(name), layer.norm_eps)
            for x, name in zip((query, key), QK_NORMS, strict=True)
        )
        return next(normed), next(normed)

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        """Return softmax(Q K^T / sqrt(d)) V [b, s, num_heads, d], with the headwise norm if set."""
        heads = context.softmax_attention(query, key, value)
        if not self.headwise_norm:
            return heads
        from diffmegatron.attention.kernels.api import HeadwiseNorm

        norm = HeadwiseNorm(layer.parameter("head_norm"), layer.norm_eps, 1.0)
        # The gradient of the norm's weight is a sum over tokens, and their order changes its last
        # bits. Keep the order [s, b, ...] of earlier versions, so that runs which resume from old
        # checkpoints stay reproducible.
        return norm.apply_to(heads.transpose(0, 1)).transpose(0, 1)

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return the description of the class for these settings: Qwen3, SeedOss, Mistral or Llama.

        With ``qkv_bias`` the class is SeedOss. Qwen2 has the same biases, but transformers 5 always
        builds Qwen's own tokenizer for a Qwen2 model. That tokenizer produces other ids than the
        run's tokenizer.

        Raises:
            UserError: no class computes these settings.
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
        config: dict[str, Any] = {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
        }
        own = {"head_dim": self.head_dim}
        if self.qkv_bias:
            # A run that started from a pretrained Qwen2 model exports the model's own config.json,
            # and adds the values of `config` that this file lacks. The file usually lacks head_dim,
            # and Qwen2 then uses hidden_size / num_heads. So `config` contains head_dim only if
            # this default is wrong. A SeedOss export always gets head_dim from `fixed`.
            if self.num_heads * self.head_dim != hidden_size:
                config |= own
            return hf.HuggingFace(
                "seed_oss", "SeedOssForCausalLM", config, fixed=own | _SEED_OSS, also=("qwen2",)
            )
        config |= own
        if self.qk_norm:
            return hf.HuggingFace("qwen3", "Qwen3ForCausalLM", config)
        if hidden_size % self.num_heads:
            # Llama's configuration requires that the number of heads divides the hidden size;
            # Mistral's does not.
            whole = {"sliding_window": None}
            return hf.HuggingFace("mistral", "MistralForCausalLM", config | whole)
        return hf.HuggingFace("llama", "LlamaForCausalLM", config, also=("mistral",))

    @classmethod
    @override
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        # With 0, `Variant.sized` chooses the head_dim with which the heads fill the hidden size.
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
