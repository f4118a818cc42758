"""What attention kernels cost, whatever the model around them: multiply-adds and saved bytes.

Loads no torch. Work is counted in multiply-adds per pair of a query and a visible key, of all
heads, as (forward, backward); what is saved for the backward pass in bytes per query, beside q, k,
v and the result.
"""

from collections.abc import Callable
from typing import NamedTuple

FLOAT32 = 4


class Sizes(NamedTuple):
    """What the costs of one attention layer on one rank depend on.

    Attributes:
        element: bytes of an element of q, k and v.
        head_dim: d.
        signal_heads: query heads of the first map; of "softmax", all query heads.
        noise_heads: query heads of the second map, h / r; 0 with one map.
        kv_heads: heads of keys and of values.
        keys: length t of the keys.
    """

    element: int
    head_dim: int
    signal_heads: int
    noise_heads: int
    kv_heads: int
    keys: int

    @property
    def is_grouped(self) -> bool:
        """Whether several signal heads share a noise head."""
        return 0 < self.noise_heads < self.signal_heads


Work = Callable[[Sizes], tuple[int, int]]
Saved = Callable[[Sizes], int]


def default_one_pass(head_dim: int, deterministic: bool) -> bool:
    """Whether the Triton backward takes the one-pass form: at d = 64, where it fits the registers.

    It adds up dQ in an order that changes from run to run, so never when asked for determinism.
    """
    return head_dim <= 64 and not deterministic


def triton_work(sizes: Sizes, *, one_pass: bool) -> tuple[int, int]:
    """`Backend.work` of the Triton kernels, of which the one-pass form computes a pair once."""
    if sizes.is_grouped:
        return per_head((3, 3), (7, 7) if one_pass else (10, 10))(sizes)
    if sizes.noise_heads:
        return per_head((3, 3), (5, 5) if one_pass else (7, 7))(sizes)
    return per_head((2, 0), (5, 0) if one_pass else (7, 0))(sizes)


def default_triton_work(sizes: Sizes) -> tuple[int, int]:
    """In the form that is the default for d."""
    return triton_work(sizes, one_pass=default_one_pass(sizes.head_dim, deterministic=False))


def per_head(forward: tuple[int, int], backward: tuple[int, int]) -> Work:
    """Work from that per signal head and per noise head, each in units of d."""

    def work(sizes: Sizes) -> tuple[int, int]:
        def of_all_heads(signal: int, noise: int) -> int:
            return sizes.head_dim * (sizes.signal_heads * signal + sizes.noise_heads * noise)

        return of_all_heads(*forward), of_all_heads(*backward)

    return work


def nothing(_: Sizes) -> int:
    """Only what the call was given."""
    return 0


def log_sum_exps(sizes: Sizes) -> int:
    """A float32 for every row of every map."""
    return FLOAT32 * (sizes.signal_heads + sizes.noise_heads)


def _noise_outputs(sizes: Sizes) -> int:
    """Elements of the second map's own output."""
    return 2 * sizes.head_dim * sizes.noise_heads


def fused(sizes: Sizes) -> int:
    """The second map's output; the first is the result and lambda times it."""
    return sizes.element * _noise_outputs(sizes) + log_sum_exps(sizes)


def two_calls(sizes: Sizes) -> int:
    """Both outputs, and of the second what the gradient of lambda multiplies by: float32."""
    outputs = sizes.element * (2 * sizes.head_dim * sizes.signal_heads + _noise_outputs(sizes))
    widened = FLOAT32 * _noise_outputs(sizes) if sizes.element < FLOAT32 else 0
    return outputs + widened + log_sum_exps(sizes)


def four_calls(sizes: Sizes) -> int:
    """As two calls, with every log-sum-exp twice, and a copy of V's halves that both maps share.

    The second output's halves are put together in a tensor of its own, even in float32.
    """
    values = sizes.element * 2 * sizes.head_dim * sizes.kv_heads
    joined = FLOAT32 * _noise_outputs(sizes) if sizes.element == FLOAT32 else 0
    return two_calls(sizes) + joined + log_sum_exps(sizes) + values


def own_output(sizes: Sizes) -> int:
    """The output of one map, of which the result is a copy."""
    return sizes.element * sizes.head_dim * sizes.signal_heads + log_sum_exps(sizes)


def whole_maps(sizes: Sizes) -> int:
    """Each softmax, the second once more without its empty rows, and what multiplies V."""
    return sizes.element * sizes.keys * 2 * (sizes.signal_heads + sizes.noise_heads)


def ring_saved(sizes: Sizes) -> int:
    """What a ring keeps, whatever computes its chunks; its result stays as well."""
    return fused(sizes)
