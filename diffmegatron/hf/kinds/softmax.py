"""Export of softmax attention as Llama, Mistral, Qwen3, SeedOss or this package's GatedLlama."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from diffmegatron.attention.kinds.softmax import Softmax
from diffmegatron.errors import UserError
from diffmegatron.hf.kinds import weight_rules as hf
from diffmegatron.hf.kinds.export import Export, register_export

# Model type of this package's class with an output gate.
GATED = "gated_llama"


@register_export(Softmax)
class SoftmaxExport(Export[Softmax]):
    """Llama, or the class that has the gate, norms, biases or head sizes of the kind."""

    model_types: ClassVar[tuple[str, ...]] = (
        *("llama", "mistral", "qwen2", "qwen3", "seed_oss"),
        GATED,
    )

    def hugging_face(self) -> hf.HuggingFace:
        """Return a model class and its configuration keys.

        With ``output_gate`` the class is this package's GatedLlama. Otherwise it is Hugging Face's
        Qwen3, SeedOss, Qwen2, Mistral or Llama. With ``qkv_bias`` it is SeedOss, or with a window
        Qwen2. Qwen2 has the same biases, but transformers 5 loads Qwen's own tokenizer for every
        Qwen2 model. Mistral has a window in all layers.
        """
        kind = self.kind
        if kind.headwise_norm:
            raise UserError(
                f"model.attention.headwise_norm True with kind {kind.kind!r} cannot be exported: "
                "Hugging Face's Llama never has the headwise norm"
            )
        if kind.output_gate is not None:
            return self._gated()
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
            if kind.window is not None:
                return hf.HuggingFace("qwen2", "Qwen2ForCausalLM", config)
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
        # Llama's configuration requires that the number of heads divides the hidden size.
        if kind.window is not None or self.hidden_size % kind.num_heads:
            return hf.HuggingFace("mistral", "MistralForCausalLM", config)
        return hf.HuggingFace("llama", "LlamaForCausalLM", config, also=("mistral",))

    @override
    def beside_others(self) -> "SoftmaxExport":
        kind = self.kind
        if kind.window is None or kind.qkv_bias or kind.qk_norm:
            return self
        return _SomeLayersExport(kind, self.hidden_size)

    def _gated(self) -> hf.HuggingFace:
        kind = self.kind
        if kind.qkv_bias:
            raise UserError(
                f"model.attention.output_gate {kind.output_gate!r} with model.attention.qkv_bias "
                "True cannot be exported: GatedLlama has no biases"
            )
        own = {"qk_norm": kind.qk_norm, "output_gate": kind.output_gate}
        return hf.HuggingFace(
            GATED,
            "GatedLlamaForCausalLM",
            hf.head_keys(kind.heads) | own,
            remote_code=True,
        )

    @override
    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[hf.WeightRule]:
        heads = self.kind.heads
        rules = [hf.qkv(ours, theirs, heads, self.hidden_size)]
        if self.kind.qkv_bias:
            rules.append(hf.qkv_bias(ours, theirs, heads))
        rules += hf.qk_norms(ours, theirs, self.kind)
        rules += hf.headwise_gate(ours, theirs, self.kind, self.hidden_size)
        return [*rules, hf.output(ours, theirs, heads, self.hidden_size)]

    @classmethod
    @override
    def read(cls, config: Mapping[str, Any]) -> Softmax:
        is_gated = config["model_type"] == GATED
        return Softmax(
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config.get("head_dim") or 0,
            qkv_bias=config["model_type"] in ("qwen2", "seed_oss"),
            qk_norm=config["qk_norm"] if is_gated else config["model_type"] == "qwen3",
            output_gate=config["output_gate"] if is_gated else None,
        )


class _SomeLayersExport(SoftmaxExport):
    """GatedLlama without a gate, for a window in some layers, which Mistral has in all."""

    @override
    def hugging_face(self) -> hf.HuggingFace:
        return self._gated()
