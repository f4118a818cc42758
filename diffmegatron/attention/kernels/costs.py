"""Costs of attention kernels, computed without torch.

*Work* is the multiply-adds of all heads for one query and one key, as a tuple (forward, backward).
*Saved bytes* are the bytes per query, for all heads, that the forward pass saves for the backward
pass. They exclude q, k, v and the result, but include copies of these tensors.
"""

from collections.abc import Callable
from typing import NamedTuple

FLOAT32 = 4


class Sizes(NamedTuple):
    """Sizes that determine the costs of one attention layer.

    `element` is the number of bytes per element of q, k and v, and `head_dim` the width of a query.
    `signal_heads` is the number of query heads of the first map. `noise_heads` is that of the
    second map, or 0 with one map. `keys` is the mean number of keys per query, including masked
    keys. If `is_deterministic`, gradients are summed in a fixed order.
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


def is_one_pass(head_dim: int, deterministic: bool, configured: bool | None = None) -> bool:
    """Return whether Triton's backward pass computes dQ in the kernel of dK and dV.

    `configured` is `Configuration.one_pass`. By default, a head_dim of at most 64 decides, because
    the kernel with all three gradients fits the registers only up to that. It sums dQ in an order
    that changes from run to run, so it is not deterministic.
    """
    return not deterministic and (head_dim <= 64 if configured is None else configured)


def triton_work(sizes: Sizes, *, one_pass: bool | None = None) -> tuple[int, int]:
    """Return the work of the Triton kernels; `one_pass` is `Configuration.one_pass`.

    In one pass, one backward kernel computes dQ, dK and dV. Otherwise dQ has its own kernel,
    and both kernels compute the scores and the gradient dP of the weights. Two maps share dP and
    the product for dV. With `sizes.is_grouped` the maps share nothing.
    """
    once = is_one_pass(sizes.head_dim, sizes.is_deterministic, one_pass)
    if sizes.is_grouped:
        return per_head((3, 3), (7, 7) if once else (10, 10))(sizes)
    if sizes.noise_heads:
        return per_head((3, 3), (5, 5) if once else (7, 7))(sizes)
    return per_head((2, 0), (5, 0) if once else (7, 0))(sizes)


def per_head(forward: tuple[int, int], backward: tuple[int, int]) -> Work:
    """Return a function that computes the work of all heads.

    Each argument is (signal, noise): the multiply-adds of one signal head and of one noise head for
    a (query, key) pair, divided by head_dim.
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
    """Return the bytes of the second map's output and of all log-sum-exps."""
    return sizes.element * _noise_outputs(sizes) + log_sum_exps(sizes)


def two_calls(sizes: Sizes) -> int:
    """Return the bytes that two calls of plain attention save: all outputs and log-sum-exps.

    With inputs narrower than float32, the gradient of lambda also needs a float32 copy of the
    second output.
    """
    outputs = sizes.element * (2 * sizes.head_dim * sizes.signal_heads + _noise_outputs(sizes))
    widened = FLOAT32 * _noise_outputs(sizes) if sizes.element < FLOAT32 else 0
    return outputs + widened + log_sum_exps(sizes)


def four_calls(sizes: Sizes) -> int:
    """Return the bytes that four calls of plain attention save: two per map, each with half of V.

    In addition to `two_calls`, they save a second set of log-sum-exps and a copy of V. With float32
    inputs, the gradient of lambda also needs the joined halves of the second output.
    """
    values = sizes.element * 2 * sizes.head_dim * sizes.kv_heads
    joined = FLOAT32 * _noise_outputs(sizes) if sizes.element == FLOAT32 else 0
    return two_calls(sizes) + joined + log_sum_exps(sizes) + values


def output_and_log_sum_exps(sizes: Sizes) -> int:
    """Return the bytes of log-sum-exps and of one map's output, saved in addition to the result."""
    return sizes.element * sizes.head_dim * sizes.signal_heads + log_sum_exps(sizes)


def reference_saved(sizes: Sizes) -> float:
    """Return the bytes that the `reference` backend saves.

    For each map it saves two tensors of the size of the softmax, a mask of one byte per query and
    key, and the keys repeated for all query heads. It also saves the values repeated for all signal
    heads. The repeated tensors replace k and v, whose bytes are subtracted.
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
