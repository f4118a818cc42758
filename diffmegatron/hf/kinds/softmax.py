"""Export of softmax attention as Llama, Mistral, Qwen3 or SeedOss."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from diffmegatron.attention.kinds.softmax import Softmax
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds import weight_rules as hf
from diffmegatron.hf.kinds.export import Export, register_export


@register_export(Softmax)
class SoftmaxExport(Export[Softmax]):
    """Llama, or the class that has the norms, biases or head sizes of the kind."""

    model_types: ClassVar[tuple[str, ...]] = ("llama", "mistral", "qwen2", "qwen3", "seed_oss")

    def hugging_face(self) -> hf.HuggingFace:
        """Return Hugging Face's class Qwen3, SeedOss, Mistral or Llama, and its configuration keys.

        With ``qkv_bias`` the class is SeedOss. Qwen2 has the same biases, but transformers 5 loads
        Qwen's own tokenizer for every Qwen2 model.
        """
        kind = self.kind
        if kind.headwise_norm:
            raise UserError(
                f"model.attention.headwise_norm True with kind {kind.kind!r} cannot be exported: "
                "Hugging Face's Llama never has the headwise norm"
            )
        if kind.qkv_bias and kind.qk_norm:
            raise UserError(
                "model.attention.qkv_bias True with model.attention.qk_norm True cannot be "
                "exported: Hugging Face's SeedOss has the one and Qwen3 the other"
            )
        config = hf.head_keys(kind.heads)
        if kind.qkv_bias:
            if kind.num_heads * kind.head_dim == self.hidden_size:
                # Qwen2's config.json usually omits this default width. Omit it too, so that the
                # export of an imported Qwen2 keeps its config.json.
                del config["head_dim"]
            fixed = {
                "head_dim": kind.head_dim,
                "attention_bias": True,
                "attention_out_bias": False,
                "attention_dropout": 0.0,
                "residual_dropout": 0.0,
            }
            return hf.HuggingFace(
                "seed_oss", "SeedOssForCausalLM", config, fixed=fixed, also=("qwen2",)
            )
        if kind.qk_norm:
            return hf.HuggingFace("qwen3", "Qwen3ForCausalLM", config)
        if self.hidden_size % kind.num_heads:
            # Llama's configuration requires that the number of heads divides the hidden size.
            whole = {"sliding_window": None}
            return hf.HuggingFace("mistral", "MistralForCausalLM", config | whole)
        return hf.HuggingFace("llama", "LlamaForCausalLM", config, also=("mistral",))

    @override
    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[hf.WeightRule]:
        heads = self.kind.heads
        rules = [hf.qkv(ours, theirs, heads, self.hidden_size)]
        if self.kind.qkv_bias:
            rules.append(hf.qkv_bias(ours, theirs, heads))
        rules += hf.qk_norms(ours, theirs, self.kind)
        return [*rules, hf.output(ours, theirs, heads, self.hidden_size)]

    @classmethod
    @override
    def read(cls, config: Mapping[str, Any]) -> Softmax:
        return Softmax(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or 0,
            qkv_bias=config["model_type"] in ("qwen2", "seed_oss"),
            qk_norm=config["model_type"] == "qwen3",
        )
