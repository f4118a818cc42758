"""Export of DIFF V2 as this package's class DiffV2ForCausalLM."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from diffmegatron.attention.kinds.diff_v2 import DiffV2
from diffmegatron.hf.kinds import weight_rules as hf
from diffmegatron.hf.kinds.export import Export, register_export


@register_export(DiffV2)
class DiffV2Export(Export[DiffV2]):
    """The class DiffV2ForCausalLM, whose code is part of the export."""

    model_types: ClassVar[tuple[str, ...]] = ("diff_v2",)

    @override
    def hugging_face(self) -> hf.HuggingFace:
        kind = self.kind
        config = hf.head_keys(kind.heads) | {
            "signal_per_noise": kind.signal_per_noise,
            "qk_norm": kind.qk_norm,
            "output_gate": kind.output_gate,
        }
        return hf.HuggingFace("diff_v2", "DiffV2ForCausalLM", config, remote_code=True)

    @override
    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[hf.WeightRule]:
        shape = (self.kind.num_heads, self.hidden_size)
        return [
            hf.qkv(ours, theirs, self.kind.heads, self.hidden_size),
            hf.output(ours, theirs, self.kind.heads, self.hidden_size),
            *hf.qk_norms(ours, theirs, self.kind),
            *hf.headwise_gate(ours, theirs, self.kind, self.hidden_size),
            hf.same(f"{ours}.lambda_proj", f"{theirs}.lambda_proj.weight", shape),
        ]

    @classmethod
    @override
    def read(cls, config: Mapping[str, Any]) -> DiffV2:
        # num_attention_heads in the configuration counts signal and noise heads together.
        ratio = config["signal_per_noise"]
        return DiffV2(
            num_heads=config["num_attention_heads"] // (ratio + 1) * ratio,
            signal_per_noise=ratio,
            num_kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            # Older exports lack these keys.
            qk_norm=config.get("qk_norm", False),
            output_gate=config.get("output_gate"),
        )
