"""DIFF V1: the Differential Transformer of Ye et al., ICLR 2025 (arXiv 2410.05258)."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from diffmegatron.attention.variants import hugging_face as hf
from diffmegatron.attention.variants.grouped import Grouped
from diffmegatron.attention.variants.two_map_variant import LAMBDA_VECTORS, TwoMaps
from diffmegatron.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

# The largest models of the paper, and the learning rate that it lowers for them (appendix E).
LARGE_MODEL, LARGE_MODEL_LR = 5e9, 7.5e-5


class DiffV1(TwoMaps):
    """Differential heads: each of ``num_heads`` has a noise head of its own.

    h is half the Transformer's: nobody halves anything by hand, the baseline doubles it.
    """

    kind: Literal["diff_v1"] = "diff_v1"

    title: ClassVar[str] = "Diff Transformer"
    model_types: ClassVar[tuple[str, ...]] = ("diffllama",)

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """DiffLlama.

        Raises:
            UserError: lambda_init is not the paper's, or there is no headwise norm.
        """
        if self.lambda_init.policy != "exponential":
            raise UserError(
                f"model.attention.lambda_init.policy {self.lambda_init.policy!r} cannot be "
                "exported: Hugging Face's DiffLlama computes lambda_init by the policy "
                "'exponential' alone"
            )
        if not self.headwise_norm:
            raise UserError(
                "model.attention.headwise_norm False with kind 'diff_v1' cannot be exported: "
                "Hugging Face's DiffLlama always has the headwise norm"
            )
        return hf.HuggingFace(
            "diffllama",
            "DiffLlamaForCausalLM",
            {
                "num_attention_heads": self.heads.queries,
                "num_key_value_heads": self.heads.keys,
                "head_dim": self.head_dim,
                "lambda_std_dev": self.lambda_std,
            },
        )

    @property
    def beside_others(self) -> Grouped:
        """Grouped heads of which each noise head serves one signal head."""
        return Grouped(signal_per_noise=1, **self.model_dump(exclude={"kind"}))

    @classmethod
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        """As :class:`Variant` says; its heads are those of both maps."""
        return cls(
            num_heads=config["num_attention_heads"] // 2,
            num_kv_heads=config["num_key_value_heads"] // 2,
            head_dim=config["head_dim"],
            lambda_std=config["lambda_std_dev"],
        )

    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[hf.WeightRule]:
        """DiffLlama keeps all heads of the first map before all of the second, values likewise.

        Its headwise norm has no weight. What it scales goes straight into the output projection,
        so the weight of channel c multiplies the columns that read channel c, in fp32. Rounding the
        lambda vectors to bf16 would move lambda itself by up to 5e-3.
        """

        def fold(proj: "Tensor", norm: "Tensor") -> tuple["Tensor", ...]:
            return (proj.float() * norm.float().repeat(self.num_heads),)

        def unfold(proj: "Tensor") -> tuple["Tensor", ...]:
            return proj, proj.new_ones(2 * self.head_dim)

        shape = (hidden_size, self.heads.output_channels)
        proj_and_norm = {
            f"{ours}.linear_proj.weight": shape,
            f"{ours}.head_norm": (2 * self.head_dim,),
        }
        return [
            hf.qkv(ours, theirs, self.heads, hidden_size),
            hf.WeightRule(proj_and_norm, {f"{theirs}.o_proj.weight": shape}, fold, unfold),
            *(
                hf.same(f"{ours}.{name}", f"{theirs}.{name}", (self.head_dim,), keep_fp32=True)
                for name in LAMBDA_VECTORS
            ),
        ]

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Where sizes suggest heads halved twice, or leave what the paper tried."""
        heads = f"model.attention.num_heads {self.num_heads}"
        if self.num_heads < 8:
            yield (
                f"{heads} is fewer than any model of the paper has; its authors advise more than 8 "
                "differential heads"
            )
        if self.heads.output_channels < hidden_size:
            yield (
                f"{heads} x 2 x head_dim {self.head_dim} is {self.heads.output_channels}, narrower "
                f"than hidden_size {hidden_size}; num_heads counts differential heads, so halve it "
                "once only"
            )
        if self.head_dim > 128:
            yield (
                f"model.attention.head_dim {self.head_dim} is above the paper's 128; num_heads "
                f"counts differential heads, so halve it once only: {hidden_size / 256:g} heads of "
                "128 fill hidden_size"
            )
        if not self.headwise_norm:
            yield (
                "model.attention.headwise_norm is off; without it the paper's 1.4B model ended at "
                "a validation loss of 3.122 instead of 3.062 (table 6)"
            )
        if parameters > LARGE_MODEL and lr > LARGE_MODEL_LR:
            yield (
                f"optimizer.lr {lr:g} is above the {LARGE_MODEL_LR:g} that the paper takes from "
                "6.8B on; loss spikes with a rising gradient norm were reported at 7B"
            )
