"""Export of grouped differential attention as this package's class GroupedDiffForCausalLM."""

from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from diffmegatron.attention.kinds.grouped import Grouped
from diffmegatron.attention.kinds.lambda_init import LambdaInit
from diffmegatron.attention.kinds.layer import HEAD_NORM
from diffmegatron.hf.kinds import weight_rules as hf
from diffmegatron.hf.kinds.export import Export, register_export


@register_export(Grouped)
class GroupedExport(Export[Grouped]):
    """The class GroupedDiffForCausalLM, whose code is part of the export."""

    model_types: ClassVar[tuple[str, ...]] = ("grouped_diff",)

    @override
    def hugging_face(self) -> hf.HuggingFace:
        kind = self.kind
        # The class computes both maps and both halves of the values in one attention call, whose
        # heads num_attention_heads and num_key_value_heads count.
        config = {
            "num_signal_heads": kind.num_heads,
            "num_attention_heads": 4 * kind.num_heads,
            "num_key_value_heads": 4 * kind.num_kv_heads,
            "head_dim": kind.head_dim,
            "signal_per_noise": kind.signal_per_noise,
            "qk_norm": kind.qk_norm,
            "output_gate": kind.output_gate,
            "headwise_norm": kind.headwise_norm,
            "lambda_init": kind.lambda_init.value or kind.lambda_init.policy,
            "lambda_std_dev": kind.lambda_std,
        }
        return hf.HuggingFace("grouped_diff", "GroupedDiffForCausalLM", config, remote_code=True)

    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[hf.WeightRule]:
        """Return the rules that convert a layer's weights to those of the exported class and back.

        In the exported class all signal heads precede all noise heads, and all first keys precede
        all second keys. The two halves of a value are adjacent.
        """
        heads = self.kind.heads
        norm = (f"{ours}.{HEAD_NORM}", f"{theirs}.subln.weight")
        shape = (2 * heads.head_dim,)
        return [
            hf.qkv(ours, theirs, heads, self.hidden_size, paired_values=True),
            hf.output(ours, theirs, heads, self.hidden_size),
            *hf.qk_norms(ours, theirs, self.kind),
            *hf.headwise_gate(ours, theirs, self.kind, self.hidden_size),
            *hf.lambda_vectors(ours, theirs, heads.head_dim),
            *([hf.same(*norm, shape, keep_fp32=True)] if self.kind.headwise_norm else []),
        ]

    @classmethod
    @override
    def read(cls, config: Mapping[str, Any]) -> Grouped:
        initial = config["lambda_init"]
        policy = {"policy": initial} if isinstance(initial, str) else {"value": initial}
        return Grouped(
            num_heads=config["num_signal_heads"],
            signal_per_noise=config["signal_per_noise"],
            num_kv_heads=config["num_key_value_heads"] // 4,
            head_dim=config["head_dim"],
            # Older exports lack these keys.
            qk_norm=config.get("qk_norm", False),
            output_gate=config.get("output_gate"),
            headwise_norm=config["headwise_norm"],
            lambda_init=LambdaInit.model_validate({"policy": "constant"} | policy),
            lambda_std=config["lambda_std_dev"],
        )
