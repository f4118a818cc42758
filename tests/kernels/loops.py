"""Attention by loops over rows and heads in float64, written independently of the package."""

import math

import torch
from torch import Tensor


def softmax_row(q: Tensor, k: Tensor, visible: list[int], scale: float) -> Tensor:
    """Return the attention weights `[t]` of a query `[d]` over keys `[t, d]`; 0 if not visible."""
    weights = torch.zeros(k.shape[0], dtype=q.dtype)
    if visible:
        index = torch.tensor(visible)
        scores = (k[index] * q).sum(-1) * scale
        exponentials = torch.exp(scores - scores.max().detach())
        weights = weights.index_copy(0, index, exponentials / exponentials.sum())
    return weights


def visible_keys(
    query: int,
    keys: int,
    causal: bool,
    query_offset: int,
    key_offset: int,
    bounds: list[int],
    window: int | None = None,
) -> list[int]:
    """Return the indices of the keys that a query may attend to.

    A new document begins at each position in `bounds`. With a window, a query sees only its own
    position and the `window - 1` positions before it.
    """

    def document(position: int) -> int:
        return sum(bound <= position for bound in bounds)

    position = query + query_offset
    return [
        key
        for key in range(keys)
        if (not causal or key + key_offset <= position)
        and (window is None or position - (key + key_offset) < window)
        and document(key + key_offset) == document(position)
    ]


def loop_diff_attention(
    q1: Tensor,
    k1: Tensor,
    q2: Tensor,
    k2: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    query_offset: int | None = None,
    key_offset: int = 0,
    bounds: tuple[int, ...] = (),
    window: int | None = None,
) -> Tensor:
    batch, rows, heads, width = q1.shape
    keys, kv_heads = k1.shape[1:3]
    ratio = heads // q2.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    if query_offset is None:
        query_offset = key_offset + keys - rows
    out = []
    for b in range(batch):
        for row in range(rows):
            visible = visible_keys(
                row, keys, causal, query_offset, key_offset, list(bounds), window
            )
            for head in range(heads):
                kv = head // (heads // kv_heads)
                first = softmax_row(q1[b, row, head], k1[b, :, kv], visible, scale)
                second = softmax_row(q2[b, row, head // ratio], k2[b, :, kv], visible, scale)
                out.append((first - lambda_ * second) @ v[b, :, kv])
    return torch.stack(out).view(batch, rows, heads, v.shape[-1])


def loop_diff_attention_v2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lambda_: Tensor,
    *,
    causal: bool = True,
    query_offset: int | None = None,
    key_offset: int = 0,
    bounds: tuple[int, ...] = (),
) -> Tensor:
    batch, rows, all_heads, width = q.shape
    keys, kv_heads = k.shape[1:3]
    heads = lambda_.shape[2]
    ratio = heads // (all_heads - heads)
    if query_offset is None:
        query_offset = key_offset + keys - rows
    out = []
    for b in range(batch):
        for row in range(rows):
            visible = visible_keys(row, keys, causal, query_offset, key_offset, list(bounds))
            results = []
            for head in range(all_heads):
                kv = head // (all_heads // kv_heads)
                weights = softmax_row(q[b, row, head], k[b, :, kv], visible, 1 / math.sqrt(width))
                results.append(weights @ v[b, :, kv])
            for group in range(all_heads - heads):
                *signals, noise = results[group * (ratio + 1) : (group + 1) * (ratio + 1)]
                for index, signal in enumerate(signals):
                    out.append(signal - lambda_[b, row, group * ratio + index] * noise)
    return torch.stack(out).view(batch, rows, heads, width)


def make_inputs(
    batch: int = 1,
    rows: int = 7,
    keys: int | None = None,
    heads: int = 2,
    noise_heads: int | None = None,
    kv_heads: int = 1,
    width: int = 4,
    lambda_: float = 0.7,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[Tensor]:
    """Return q1, k1, q2, k2, v and lambda_, all of which require a gradient.

    The first five are drawn from a standard normal distribution. By default, there are as many
    noise heads as signal heads.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = rows if keys is None else keys

    def draw(*shape: int) -> Tensor:
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.to(dtype).requires_grad_()

    q1 = draw(batch, rows, heads, width)
    k1 = draw(batch, keys, kv_heads, width)
    q2 = draw(batch, rows, noise_heads or heads, width)
    k2 = draw(batch, keys, kv_heads, width)
    v = draw(batch, keys, kv_heads, 2 * width)
    lambda_dtype = dtype if dtype == torch.float64 else torch.float32
    return [q1, k1, q2, k2, v, torch.tensor(lambda_, dtype=lambda_dtype, requires_grad=True)]


def make_v2_inputs(
    batch: int = 1,
    rows: int = 7,
    keys: int | None = None,
    heads: int = 2,
    ratio: int = 1,
    kv_heads: int = 1,
    width: int = 4,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """Return q, k, v and lambda_ for `heads` signal heads; all require a gradient."""
    generator = torch.Generator().manual_seed(heads + 10 * ratio)
    keys = rows if keys is None else keys
    shapes = (
        (rows, heads + heads // ratio, width),
        (keys, kv_heads, width),
        (keys, kv_heads, width),
        (rows, heads),
    )
    drawn = [torch.randn(batch, *x, generator=generator, dtype=torch.float64) for x in shapes]
    drawn[3] = drawn[3].sigmoid()
    return [x.to(dtype).requires_grad_() for x in drawn]


def value_and_grads(function, inputs, seed=1):
    """Return the output of a function, and the gradients of its inputs for a random gradient."""
    out = function(*inputs)
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return out, torch.autograd.grad(
        out, inputs, direction.to(out.dtype), allow_unused=True, materialize_grads=True
    )


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest deviation, divided by the largest expected magnitude (at least by 1)."""
    expected = expected.detach().to(torch.float64)
    deviation = (actual.detach().to(torch.float64) - expected).abs().max()
    return float(deviation / expected.abs().max().clamp_min(1.0))
