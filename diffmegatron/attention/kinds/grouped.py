"""Grouped differential attention (Motif, arXiv 2510.06949): DIFF V1 with fewer noise heads.

Signal heads are the query heads of the first map, noise heads the query heads of the second map.
Motif-2-12.7B has 32 signal heads, 8 noise heads, 16 keys and 16 values of width 128. Its recipe has
``num_heads`` 32, ``signal_per_noise`` 4 and ``num_kv_heads`` 8: a key-value head has two keys.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Self

from typing_extensions import override

from diffmegatron.section import Size

from . import hugging_face as hf
from .diff_v1 import DiffV1, LambdaInit


class Grouped(DiffV1):
    """Differential heads in which r = ``signal_per_noise`` signal heads share one noise head.

    r = 1 is DIFF V1. The paper finds r = 3 and r = 4 best at equal FLOPs.
    """

    kind: Literal["grouped"] = "grouped"  # type: ignore[assignment]
    signal_per_noise: Size = 4

    title: ClassVar[str] = "Grouped Diff Transformer"
    model_types: ClassVar[tuple[str, ...]] = ("grouped_diff",)

    @property
    def ratio(self) -> int:
        """Number r of signal heads per noise head."""
        return self.signal_per_noise

    @override
    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        # The inherited warnings compare the settings with the models in the paper of DIFF V1.
        return iter(())

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return this package's class GroupedDiffForCausalLM and the keys of its configuration."""
        # The class computes both maps and both halves of the values in one attention call, whose
        # heads num_attention_heads and num_key_value_heads count.
        config = {
            "num_signal_heads": self.num_heads,
            "num_attention_heads": 4 * self.num_heads,
            "num_key_value_heads": 4 * self.num_kv_heads,
            "head_dim": self.head_dim,
            "signal_per_noise": self.signal_per_noise,
            "headwise_norm": self.headwise_norm,
            "lambda_init": self.lambda_init.value or self.lambda_init.policy,
            "lambda_std_dev": self.lambda_std,
        }
        return hf.HuggingFace("grouped_diff", "GroupedDiffForCausalLM", config, remote_code=True)

    @classmethod
    @override
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        initial = config["lambda_init"]
        policy = {"policy": initial} if isinstance(initial, str) else {"value": initial}
        return cls(
            num_heads=config["num_signal_heads"],
            signal_per_noise=config["signal_per_noise"],
            num_kv_heads=config["num_key_value_heads"] // 4,
            head_dim=config["head_dim"],
            headwise_norm=config["headwise_norm"],
            lambda_init=LambdaInit.model_validate({"policy": "constant"} | policy),
            lambda_std=config["lambda_std_dev"],
        )

    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[hf.WeightRule]:
        """Return the rules that convert a layer's weights to those of the exported class and back.

        In the exported class all signal heads precede all noise heads, and all first keys precede
        all second keys. The two halves of a value are adjacent.
        """
        norm, shape = (f"{ours}.head_norm", f"{theirs}.subln.weight"), (2 * self.head_dim,)
        return [
            hf.qkv(ours, theirs, self.heads, hidden_size, paired_values=True),
            hf.output(ours, theirs, self.heads, hidden_size),
            *self._vector_rules(ours, theirs),
            *([hf.same(*norm, shape, keep_fp32=True)] if self.headwise_norm else []),
        ]

    @property
    @override
    def mixed_export_kind(self) -> "Grouped":
        return self
