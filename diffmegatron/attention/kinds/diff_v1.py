"""DIFF V1: the Differential Transformer of Ye et al., ICLR 2025 (arXiv 2410.05258).

    [Q1; Q2] = X W_Q    [K1; K2] = X W_K    V = X W_V
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init
    DiffAttn(X) = (softmax(Q1 K1^T / sqrt(d)) - lambda softmax(Q2 K2^T / sqrt(d))) V
    head = (1 - lambda_init) RMSNorm(DiffAttn(X))

X is the input of the attention, [tokens, hidden_size]. Per head, Q1, Q2, K1 and K2 are [tokens, d],
and V is [tokens, 2d]. lambda_q1, lambda_k1, lambda_q2 and lambda_k2 are trained vectors [d] of the
layer. By default lambda_init is 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l, counted from 1.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from typing_extensions import override

from diffmegatron.attention.kernels.costs import FLOAT32, Sizes, ring_saved
from diffmegatron.attention.kernels.registry import DIFFERENTIAL
from diffmegatron.errors import UserError
from diffmegatron.section import Section

from . import hugging_face as hf
from .kind import AttentionKind, Kernels
from .layer import Constant, Context, Heads, Layer, Parameter, Rows
from .softmax import Softmax

if TYPE_CHECKING:
    from torch import Tensor

LAMBDA_VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
# The paper's models above LARGE_MODEL parameters use the learning rate LARGE_MODEL_LR (appendix E).
LARGE_MODEL, LARGE_MODEL_LR = 5e9, 7.5e-5


class LambdaInit(Section):
    """The policy of lambda_init (Ye et al., ICLR 2025, section 2.1 and the ablations of 3.8).

    ``exponential`` is 0.8 - 0.6 exp(-0.3 (l - 1)) in layer l, counted from 1. ``constant`` is
    ``value`` in every layer.
    """

    policy: Literal["exponential", "constant"] = "exponential"
    value: float | None = Field(default=None, gt=0, lt=1)

    @model_validator(mode="after")
    def _value_belongs_to_constant(self) -> Self:
        if (self.policy == "constant") != (self.value is not None):
            raise ValueError(
                f"model.attention.lambda_init.value is {self.value} with policy {self.policy!r}; "
                "give a value with 'constant' and none with 'exponential'"
            )
        return self

    def of_layer(self, number: int) -> float:
        """Return lambda_init of layer ``number``, counted from 1 over all pipeline stages."""
        if self.value is not None:
            return self.value
        return 0.8 - 0.6 * math.exp(-0.3 * (number - 1))


class DiffV1(AttentionKind):
    """Differential heads, each with two softmax maps and an output of width 2d; d is ``head_dim``.

    Each of the ``num_kv_heads`` key-value heads has two keys of width d and a value of width 2d.
    ``lambda_std`` is the standard deviation of the initial lambda vectors; its default is from the
    authors' code. ``headwise_norm`` applies an RMSNorm to each head's output. All heads share the
    norm's weight [2d].
    """

    kind: Literal["diff_v1"] = "diff_v1"
    lambda_init: LambdaInit = LambdaInit()
    lambda_std: float = Field(default=0.1, ge=0)
    headwise_norm: bool = True

    title: ClassVar[str] = "Diff Transformer"
    output_width: ClassVar[int] = 2
    operation: ClassVar[Literal["differential", "softmax"]] = "differential"
    free_keys: ClassVar[frozenset[str]] = frozenset({"lambda_std"})
    model_types: ClassVar[tuple[str, ...]] = ("diffllama",)

    def warnings(self, hidden_size: int, parameters: int, lr: float) -> Iterator[str]:
        """Yield a warning for each setting that differs from the paper and is often a mistake."""
        heads = f"model.attention.num_heads {self.num_heads}"
        if self.num_heads < 8:
            yield (
                f"{heads} is fewer than the 8 of the paper's smallest models; its authors advise "
                "more than 8 differential heads"
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

    def baseline(self) -> Softmax:
        """Return softmax attention with twice the number of heads and of key-value heads."""
        # Twice a valid number of heads can exceed a recipe's limit, so skip the validation.
        return Softmax.model_construct(
            num_heads=2 * self.num_heads, num_kv_heads=2 * self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def noise_heads(self) -> int:
        """Number of query heads of the second map."""
        return self.num_heads // self.ratio

    @property
    def heads(self) -> Heads:
        """Layout of the heads in ``linear_qkv``: one block per key-value head.

        A block begins with the query heads of the first map, their key, and the first half of the
        value. The noise heads, their key, and the second half of the value follow.
        """
        signal, noise = (n // self.num_kv_heads for n in (self.num_heads, self.noise_heads))
        rows: Rows = (("q", signal), ("k", 1), ("v", 1), ("q", noise), ("k", 1), ("v", 1))
        return Heads(self.head_dim, self.num_kv_heads, rows, 2 * signal)

    def parameters(self, hidden_size: int) -> tuple[Parameter, ...]:
        """Return the lambda vectors and, with ``headwise_norm``, the norm's weight."""
        # Rounding the vectors to bf16 would change lambda by 1e-3 to 5e-3.
        vectors = [
            Parameter(name, (self.head_dim,), self.lambda_std, "lambda", float32=True)
            for name in LAMBDA_VECTORS
        ]
        norm = Parameter("head_norm", (2 * self.head_dim,), Constant(1.0), "norm", float32=True)
        return (*vectors, norm) if self.headwise_norm else tuple(vectors)

    @override
    def products(self) -> int:
        # A score costs d multiply-adds in each query head. The product of the subtracted maps with
        # the values costs 2d in each signal head.
        return (3 * self.num_heads + self.noise_heads) * self.head_dim

    @override
    def kernel_sizes(self, element: int, keys: float) -> Sizes:
        return Sizes(
            element, self.head_dim, self.num_heads, self.noise_heads, self.num_kv_heads, keys
        )

    @override
    def saved_bytes(self, kernels: Kernels) -> tuple[float, float]:
        heads, sizes = self.heads, self.kernel_sizes(kernels.element, kernels.keys)
        outputs, backend = heads.output_channels, DIFFERENTIAL[kernels.backend]
        if kernels.communication == "ring":
            core, saves_result, fuses_norm = float(ring_saved(sizes)), True, False
        else:
            core, saves_result = backend.saved(sizes), backend.saves_result
            fuses_norm = backend.fuses_norm and not sizes.is_grouped
        if saves_result:
            core += kernels.element * outputs
        if self.headwise_norm and not fuses_norm:
            # The norm saves its float32 input and one float32 per head. On a CPU it also saves its
            # normalised input.
            core += FLOAT32 * (outputs * (2 if kernels.device == "cpu" else 1) + self.num_heads)
        projected = kernels.element * (heads.query_channels + outputs)
        if kernels.recomputes_core:
            # Recomputation saves v, a view that keeps all of linear_qkv's output in memory.
            projected += kernels.element * (heads.query_channels + 2 * heads.key_channels)
        return projected + self._key_value_bytes(kernels), core

    def _key_value_bytes(self, kernels: Kernels) -> float:
        backend, keys = DIFFERENTIAL[kernels.backend], kernels.element * self.heads.key_channels
        if kernels.communication == "ring" or backend.saves_values:
            return 2 * keys * kernels.key_shards
        if kernels.has_mask and backend.saves_bias and self.num_heads > self.num_kv_heads:
            # This backend calls torch's attention twice per map, each time with one half of the
            # value. Each call copies a key and half a value, both of width d, for every query head.
            return 4 * kernels.element * self.heads.query_channels * kernels.keys_per_query
        # Keys are saved once per key shard. Each call copies its values: in total `keys_per_query`
        # values per token of this rank. `Backend.saved` already counts one of these values.
        saved = keys * (kernels.key_shards + kernels.keys_per_query - 1)
        # With context parallelism, the saved keys are views of a received tensor that also has the
        # values, and keep this tensor in memory.
        return saved if kernels.communication is None else saved + keys * kernels.key_shards

    @override
    def current_lambda(self, layer: Layer) -> "Tensor":
        vectors = (layer.parameter(name) for name in LAMBDA_VECTORS)
        return _lambda(vectors, self.lambda_init.of_layer(layer.layer_number))

    def forward(
        self,
        layer: Layer,
        context: Context,
        query: "Tensor",
        key: "Tensor",
        value: "Tensor",
        gate: "Tensor | None",
    ) -> "Tensor":
        """Return (1 - lambda_init) RMSNorm(DiffAttn(X)), [b, s, heads of this rank, 2d].

        Without ``headwise_norm``, return DiffAttn(X).
        """
        from diffmegatron.attention.kernels.api import HeadwiseNorm

        q1, k1, q2, k2, v = self._split(query, key, value)
        lambda_ = self.current_lambda(layer)
        norm = None
        if self.headwise_norm:
            scale = 1.0 - self.lambda_init.of_layer(layer.layer_number)
            norm = HeadwiseNorm(layer.parameter("head_norm"), layer.norm_eps, scale)
        return context.diff_attention(q1, k1, q2, k2, v, lambda_=lambda_, norm=norm)

    def _split(self, query: "Tensor", key: "Tensor", value: "Tensor") -> tuple["Tensor", ...]:
        """Return q1, k1, q2, k2 and v from the heads of this rank, which are ordered by blocks.

        q1 is [b, s, h, d], q2 is [b, s, h / r, d], k1 and k2 are [b, s, h_kv, d], and v is
        [b, s, h_kv, 2d]. On this rank, h is the number of signal heads, and h_kv the number of
        key-value heads. r is :attr:`ratio`.
        """
        blocks = key.shape[2] // 2
        noise = query.shape[2] // blocks // (self.ratio + 1)
        q1, q2 = query.unflatten(2, (blocks, -1)).split([self.ratio * noise, noise], dim=3)
        q1, q2 = q1.flatten(2, 3), q2.flatten(2, 3)
        if self.ratio > 1:
            # Copy the noise heads, because a view of them would keep the signal heads in memory.
            q2 = q2.contiguous()
        k1, k2 = key.unflatten(2, (blocks, 2)).unbind(3)
        v = value.unflatten(2, (blocks, 2)).flatten(3)
        return q1, k1, q2, k2, v

    def hugging_face(self, hidden_size: int) -> hf.HuggingFace:
        """Return Hugging Face's class DiffLlamaForCausalLM and the keys of its configuration."""
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
        config = hf.head_keys(self.heads) | {"lambda_std_dev": self.lambda_std}
        return hf.HuggingFace("diffllama", "DiffLlamaForCausalLM", config)

    @classmethod
    @override
    def from_hugging_face(cls, config: Mapping[str, Any]) -> Self:
        # The configuration counts the heads of both maps, twice as many as `num_heads`.
        return cls(
            num_heads=config["num_attention_heads"] // 2,
            num_kv_heads=config["num_key_value_heads"] // 2,
            head_dim=config["head_dim"],
            lambda_std=config["lambda_std_dev"],
        )

    def weight_rules(self, ours: str, theirs: str, hidden_size: int) -> list[hf.WeightRule]:
        """Return the rules that convert a layer's weights to those of DiffLlama and back.

        In DiffLlama all signal heads precede all noise heads, all first keys precede all second
        keys, and the first halves of all values precede the second halves. Its headwise norm has no
        weight, so the export multiplies our norm's weight into the output projection. The import
        sets our norm's weight to 1.
        """

        def fold(proj: "Tensor", norm: "Tensor") -> tuple["Tensor", ...]:
            return (proj.float() * norm.float().repeat(self.num_heads),)

        def unfold(proj: "Tensor") -> tuple["Tensor", ...]:
            return proj, proj.new_ones(2 * self.head_dim)

        shape = (hidden_size, self.heads.output_channels)
        norm_shape = (2 * self.head_dim,)
        proj_and_norm = {f"{ours}.linear_proj.weight": shape, f"{ours}.head_norm": norm_shape}
        return [
            hf.qkv(ours, theirs, self.heads, hidden_size),
            hf.WeightRule(proj_and_norm, {f"{theirs}.o_proj.weight": shape}, fold, unfold),
            *self._vector_rules(ours, theirs),
        ]

    def _vector_rules(self, ours: str, theirs: str) -> list[hf.WeightRule]:
        return [
            hf.same(f"{ours}.{name}", f"{theirs}.{name}", (self.head_dim,), keep_fp32=True)
            for name in LAMBDA_VECTORS
        ]

    @property
    def mixed_export_kind(self) -> AttentionKind:
        """Grouped attention with one signal head per noise head, which is equivalent to DIFF V1."""
        from .grouped import Grouped

        return Grouped(signal_per_noise=1, **self.model_dump(exclude={"kind"}))

    @property
    @override
    def map_pairs(self) -> tuple[tuple[int, int], ...]:
        # In the classes of Hugging Face all signal heads precede all noise heads.
        return tuple((n, self.num_heads + n // self.ratio) for n in range(self.num_heads))

    @override
    def subtracted_maps(self, attention: Any, maps: "Tensor", hidden: "Tensor") -> "Tensor":
        signal, noise = maps.split((self.num_heads, self.noise_heads))
        vectors = (getattr(attention, name).float() for name in LAMBDA_VECTORS)
        lambda_ = _lambda(vectors, attention.lambda_init)
        return signal - lambda_ * noise.repeat_interleave(self.ratio, dim=0)


def _lambda(vectors: "Iterable[Tensor]", lambda_init: float) -> "Tensor":
    q1, k1, q2, k2 = vectors
    return (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + lambda_init
