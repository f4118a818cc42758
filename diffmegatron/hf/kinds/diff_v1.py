"""Export of DIFF V1 as Hugging Face's class DiffLlamaForCausalLM."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from diffmegatron.attention.kinds.diff_v1 import DiffV1
from diffmegatron.attention.kinds.grouped import Grouped
from diffmegatron.attention.kinds.layer import HEAD_NORM
from diffmegatron.hf.kinds import weight_rules as hf
from diffmegatron.hf.kinds.export import Export, register_export
from diffmegatron.hf.kinds.grouped import GroupedExport

if TYPE_CHECKING:
    from torch import Tensor


@register_export(DiffV1)
class DiffV1Export(Export[DiffV1]):
    """DiffLlama, or grouped attention with r = 1 for what DiffLlama does not compute.

    DiffLlama has no ``qk_norm``, no ``output_gate``, no ``window``, no constant lambda_init, no
    output without the headwise norm, and no layers of other kinds.
    """

    model_types: ClassVar[tuple[str, ...]] = ("diffllama",)
    is_served: ClassVar[bool] = False

    @property
    def _fits_diffllama(self) -> bool:
        kind = self.kind
        is_exponential = kind.lambda_init.policy == "exponential"
        has_additions = kind.qk_norm or (kind.output_gate, kind.window) != (None, None)
        return is_exponential and kind.headwise_norm and not has_additions

    @override
    def hugging_face(self) -> hf.HuggingFace:
        kind = self.kind
        if not self._fits_diffllama:
            return self.beside_others().hugging_face()
        config = hf.head_keys(kind.heads) | {"lambda_std_dev": kind.lambda_std}
        return hf.HuggingFace("diffllama", "DiffLlamaForCausalLM", config)

    def rules(self, ours: str, theirs: str, *, layer: int, step: int) -> list[hf.WeightRule]:
        """Return the rules that convert a layer's weights to those of DiffLlama and back.

        In DiffLlama all signal heads precede all noise heads, all first keys precede all second
        keys, and the first halves of all values precede the second halves. Its headwise norm has no
        weight, so the export multiplies our norm's weight into the output projection. The import
        sets our norm's weight to 1.
        """
        if not self._fits_diffllama:
            return self.beside_others().rules(ours, theirs, layer=layer, step=step)
        count, d = self.kind.num_heads, self.kind.head_dim

        def fold(proj: "Tensor", norm: "Tensor") -> tuple["Tensor", ...]:
            return (proj.float() * norm.float().repeat(count),)

        def unfold(proj: "Tensor") -> tuple["Tensor", ...]:
            return proj, proj.new_ones(2 * d)

        shape = (self.hidden_size, self.kind.heads.output_channels)
        folded = {f"{ours}.linear_proj.weight": shape, f"{ours}.{HEAD_NORM}": (2 * d,)}
        return [
            hf.qkv(ours, theirs, self.kind.heads, self.hidden_size),
            hf.WeightRule(folded, {f"{theirs}.o_proj.weight": shape}, fold, unfold),
            *hf.lambda_vectors(ours, theirs, d),
        ]

    @classmethod
    @override
    def read(cls, config: Mapping[str, Any]) -> DiffV1:
        # The configuration counts the heads of both maps, twice as many as `num_heads`.
        return DiffV1(
            num_heads=config["num_attention_heads"] // 2,
            num_kv_heads=config["num_key_value_heads"] // 2,
            head_dim=config["head_dim"],
            lambda_std=config["lambda_std_dev"],
        )

    @override
    def beside_others(self) -> GroupedExport:
        same = Grouped(signal_per_noise=1, **self.kind.model_dump(exclude={"kind"}))
        return GroupedExport(same, self.hidden_size)
