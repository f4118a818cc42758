"""Costs of attention kernels, computed without torch.

*Work* is (forward, backward) multiply-adds of all heads per pair of a query and a visible key.
*Saved bytes* are the bytes per query that the forward pass saves for the backward pass, in addition
to q, k, v and the result.
"""

from collections.abc import Callable
from typing import NamedTuple

FLOAT32 = 4


class Sizes(NamedTuple):
    """Sizes that determine the costs of one attention layer on one rank.

    Attributes:
        element: bytes of an element of q, k and v.
        head_dim: width d of a query and of a key.
        signal_heads: query heads of the first map; in softmax attention, all query heads.
        noise_heads: query heads of the second map; 0 with one map.
        keys: mean number of keys that a query sees.
        is_deterministic: whether the kernels must sum gradients in a fixed order.
    """

    element: int
    head_dim: int
    signal_heads: int
    noise_heads: int
    kv_heads: int
    keys: float
    is_deterministic: bool = False

    @property
    def is_grouped(self) -> bool:
        """True if several signal heads share a noise head."""
        return 0 < self.noise_heads < self.signal_heads


Work = Callable[[Sizes], tuple[int, int]]
Saved = Callable[[Sizes], float]


def default_one_pass(head_dim: int, deterministic: bool) -> bool:
    """Return whether Triton's backward pass computes dQ in the kernel of dK and dV by default.

    The one-pass kernel fits the registers up to a head_dim of 64. It sums dQ in an order that
    changes from run to run, so deterministic runs need the split form with two kernels.
    """
    return head_dim <= 64 and not deterministic


def triton_work(sizes: Sizes, *, one_pass: bool) -> tuple[int, int]:
    """Return the work of the Triton kernels in the one-pass or the split form.

    In the split form both backward kernels compute the scores and the gradient dP of the attention
    weights. Two maps in one kernel share dP and the product for dV. Grouped maps have separate
    kernels and share no product.
    """
    if sizes.is_grouped:
        return per_head((3, 3), (7, 7) if one_pass else (10, 10))(sizes)
    if sizes.noise_heads:
        return per_head((3, 3), (5, 5) if one_pass else (7, 7))(sizes)
    return per_head((2, 0), (5, 0) if one_pass else (7, 0))(sizes)


def default_triton_work(sizes: Sizes) -> tuple[int, int]:
    """Return the work of the Triton kernels in the form that is the default for these sizes."""
    return triton_work(sizes, one_pass=default_one_pass(sizes.head_dim, sizes.is_deterministic))


def per_head(forward: tuple[int, int], backward: tuple[int, int]) -> Work:
    """Return a function that computes the work of all heads.

    `forward` and `backward` are multiply-adds per (query, key) pair, divided by head_dim: first of
    one signal head, then of one noise head.
    """

    def work(sizes: Sizes) -> tuple[int, int]:
        def of_all_heads(signal: int, noise: int) -> int:
            return sizes.head_dim * (sizes.signal_heads * signal + sizes.noise_heads * noise)

        return of_all_heads(*forward), of_all_heads(*backward)

    return work


def zero_bytes(_: Sizes) -> int:
    """Return 0, for kernels that save only the inputs of the call."""
    return 0


def log_sum_exps(sizes: Sizes) -> int:
    """Return the bytes of the log-sum-exps of one query: one float32 per query head."""
    return FLOAT32 * (sizes.signal_heads + sizes.noise_heads)


def _noise_outputs(sizes: Sizes) -> int:
    return 2 * sizes.head_dim * sizes.noise_heads


def fused(sizes: Sizes) -> int:
    """Return the bytes that a fused kernel saves: the second map's output and all log-sum-exps.

    The backward pass computes the first map's output from the result and the second map's output.
    """
    return sizes.element * _noise_outputs(sizes) + log_sum_exps(sizes)


def two_calls(sizes: Sizes) -> int:
    """Return the bytes saved by two calls of plain attention, one per map.

    They save both outputs and the log-sum-exps. The gradient of lambda also needs the second output
    in float32, which is one more copy if the inputs are narrower.
    """
    outputs = sizes.element * (2 * sizes.head_dim * sizes.signal_heads + _noise_outputs(sizes))
    widened = FLOAT32 * _noise_outputs(sizes) if sizes.element < FLOAT32 else 0
    return outputs + widened + log_sum_exps(sizes)


def four_calls(sizes: Sizes) -> int:
    """Return the bytes saved by four calls of plain attention: two per map, each with half of V.

    The calls save the bytes of `two_calls`, a second set of log-sum-exps, and a copy of V, which
    both maps share. The gradient of lambda needs the second output in float32, joined from its two
    halves; with inputs narrower than float32 `two_calls` already counts it.
    """
    values = sizes.element * 2 * sizes.head_dim * sizes.kv_heads
    joined = FLOAT32 * _noise_outputs(sizes) if sizes.element == FLOAT32 else 0
    return two_calls(sizes) + joined + log_sum_exps(sizes) + values


def output_and_log_sum_exps(sizes: Sizes) -> int:
    """Return the bytes of one map's output and log-sum-exps, as FlexAttention saves them.

    The result is a copy of the saved output, so the output needs its own memory.
    """
    return sizes.element * sizes.head_dim * sizes.signal_heads + log_sum_exps(sizes)


def reference_saved(sizes: Sizes) -> float:
    """Return the bytes that the `reference` backend saves.

    Per map it saves two tensors of the size of the softmax, and the mask, which has one byte per
    (query, key) pair for all heads. It also saves copies of the keys and values for each query
    head. The first copy replaces k and v, which the saved bytes exclude.
    """
    kv, maps = sizes.kv_heads, [sizes.signal_heads]
    values = sizes.signal_heads - kv
    if sizes.noise_heads:
        maps.append(sizes.noise_heads)
        values *= 2
    copies = sizes.element * sizes.head_dim * (values + sum(heads - kv for heads in maps))
    return sizes.keys * (2 * sizes.element * sum(maps) + len(maps)) + copies


def ring_saved(sizes: Sizes) -> int:
    """Return the bytes that ring attention saves with any backend, in addition to its result."""
    return fused(sizes)
