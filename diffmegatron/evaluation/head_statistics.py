"""Statistics of a network's heads over one text; docs/reference/suites.md defines every measure.

A score is an entry of a head's attention map. In differential attention, the map is the difference
of two softmax maps. A row of a map has the scores of one query token.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.captured_attention import LayerAttention, layers, row_blocks
from diffmegatron.evaluation.model import Model

# Names of measures, and parts of names. The two maps of a differential head are softmax maps: the
# signal map, and the noise map that is subtracted from it.
MAPS, HEADS = "two maps of a head", "two heads of a layer"
TOP, IN_TOP, IN_REST = "overlap of top tokens", "overlap of top scores", "overlap of other scores"
NEAR_ZERO = "share of |scores| below "
ENTROPY, FIRST_ENTROPY, SECOND_ENTROPY = "entropy", "entropy, first map", "entropy, second map"
NEGATIVE, NEGATIVE_MASS = "share of negative scores", "negative share of |scores|"


@torch.no_grad()
def map_statistics(
    seen: Sequence[LayerAttention], top: float, epsilons: Sequence[float]
) -> tuple[dict[str, list[float]], Tensor]:
    """Return measures of every layer's maps, and the distances between the maps of all heads.

    A measure has one value per layer, a mean over rows and heads (or pairs of heads). A distance is
    1 - cosine similarity of the maps of two heads of the network, float64 [all heads, all heads].

    Args:
        seen: all layers of one forward pass, in order.
        top: share of a row's tokens that are top tokens, those with the largest absolute scores.
        epsilons: thresholds for scores near zero; each threshold has a measure.
    """
    rows, queries = seen[0].rows, sum(len(each.call.query) for each in seen)
    sums: list[dict[str, tuple[Tensor | float, int]]] = [{} for _ in seen]
    products: Tensor = torch.zeros((), dtype=torch.float64, device=seen[0].hidden.device)
    for first, end in row_blocks(queries, rows):
        block, scores = _Block(first, end, top, seen[0].hidden.device), []
        for layer, of_layer in zip(seen, sums, strict=True):
            softmax = layer.logits(first, end).softmax(-1)
            maps = layer.subtracted(softmax, first, end)
            if not maps.isfinite().all():
                raise NotFiniteError(f"a score of layer {layer.number + 1} is not finite")
            for name, value in _measured(block, layer, softmax, maps, epsilons):
                total, count = of_layer.get(name, (0.0, 0))
                of_layer[name] = total + value.double().sum(), count + value.numel()
            scores.append(maps.flatten(1))
        flat = torch.cat(scores)
        products = products + (flat @ flat.T).double()
    means = {
        name: [float(of_layer[name][0] / of_layer[name][1]) for of_layer in sums]
        for name in sums[0]
    }
    for name, by_layer in means.items():
        for number, mean in enumerate(by_layer, start=1):
            if not math.isfinite(mean):
                raise NotFiniteError(f"{name} of layer {number} is not finite")
    lengths = products.diagonal().sqrt()
    return means, 1 - products / (lengths[:, None] * lengths)


def _measured(
    block: "_Block", layer: LayerAttention, softmax: Tensor, maps: Tensor, epsilons: Sequence[float]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the values [heads or pairs of heads, rows] of every measure.

    ``softmax`` has the softmax maps, [query heads, rows, keys]. ``maps`` has the result of
    ``layer.subtracted``, [heads, rows, keys]. Measures of overlap leave out rows without a top
    token.
    """
    sizes = maps.abs()
    for epsilon in epsilons:
        yield f"{NEAR_ZERO}{epsilon:g}", block.share(sizes < epsilon)
    yield ENTROPY, _entropy(sizes)
    yield NEGATIVE, block.share(maps < 0)
    yield NEGATIVE_MASS, (sizes - maps).sum(2) / 2 / sizes.sum(2)
    tops = block.tops(sizes)
    if len(maps) > 1:
        one, other = torch.triu_indices(len(maps), len(maps), 1, device=maps.device)
        together = torch.einsum("hrk,grk->hgr", tops, tops)[one, other]
        yield f"{TOP}, {HEADS}", together[:, block.skipped :] / block.counts[block.skipped :]
    if pairs := layer.head_maps.pairs:
        signal, noise = (softmax[[pair[side] for pair in pairs]] for side in (0, 1))
        yield FIRST_ENTROPY, _entropy(signal)
        yield SECOND_ENTROPY, _entropy(noise)
        yield from _overlaps(block, signal, noise)


def _overlaps(block: "_Block", signal: Tensor, noise: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and values [heads, rows] of each overlap of ``signal`` and ``noise``.

    ``signal`` and ``noise`` have the two maps of each head, [heads, rows, keys]. The overlap of top
    tokens is the share of top tokens that the two maps have in common. The overlap of scores is
    sum(min) / sum(max) of the entries of the two maps, or 0 if the second sum is 0. The sums are
    over the tokens that are top tokens of at least one map (``IN_TOP``), or over the remaining
    tokens (``IN_REST``).
    """
    one, other = block.tops(signal), block.tops(noise)
    both = (one * other).sum(2)[:, block.skipped :]
    yield f"{TOP}, {MAPS}", both / block.counts[block.skipped :]
    smaller, larger, either = signal.minimum(noise), signal.maximum(noise), one.maximum(other)
    for name, chosen in ((IN_TOP, either), (IN_REST, 1 - either)):
        shares = (smaller * chosen).sum(2) / (larger * chosen).sum(2)
        yield f"{name}, {MAPS}", shares[:, block.skipped :].nan_to_num(0)


def _entropy(sizes: Tensor) -> Tensor:
    """Scale each row of [heads, rows, keys] to sum 1, and return its entropy in nats."""
    return torch.special.entr(sizes / sizes.sum(2, keepdim=True)).sum(2)


class _Block:
    """Rows ``first`` to ``end - 1`` of causal maps; row n, from 0, has n + 1 scores."""

    def __init__(self, first: int, end: int, top: float, device: torch.device) -> None:
        self._lengths = torch.arange(first, end, device=device) + 1
        # Number of top tokens of each row, rounded down. 1e-9 corrects products that are slightly
        # below an integer because of rounding. The block's first `skipped` rows have no top token.
        self.counts = (self._lengths.double() * top + 1e-9).floor().long()
        self.skipped = int((self.counts == 0).sum())
        self._earlier = torch.arange(end, device=device) < self._lengths[:, None]

    def share(self, chosen: Tensor) -> Tensor:
        """Return the share of each row's scores that are chosen, [heads, rows]."""
        return (chosen & self._earlier).sum(2) / self._lengths

    def tops(self, sizes: Tensor) -> Tensor:
        """Return 1 for the top tokens of each row and 0 for other tokens, [heads, rows, keys]."""
        most = max(1, int(self.counts[-1]))
        places = sizes.masked_fill(~self._earlier, -torch.inf).topk(most, dim=2).indices
        is_top = torch.arange(most, device=sizes.device) < self.counts[:, None]
        return torch.zeros_like(sizes).scatter(2, places, is_top.expand_as(places).to(sizes.dtype))


@torch.no_grad()
def feature_alignment(features: Sequence[Tensor]) -> Tensor:
    """Return the linear CKA (centred kernel alignment) of every two heads, float64 [heads, heads].

    CKA is computed from the unbiased HSIC (Hilbert-Schmidt independence criterion) by equation 3 of
    Nguyen, Raghu, Kornblith (2021). ``features`` has one tensor per layer with the outputs of its
    heads, [tokens, heads, width]. The result has the heads of all layers.
    """
    # The mean over the tokens does not change HSIC, but costs precision in float32, so subtract it.
    centred = [x.float() - x.float().mean(0) for x in features]
    ends = torch.tensor([0, *(x.shape[1] for x in features)]).cumsum(0).tolist()
    found = features[0].new_zeros(ends[-1], ends[-1], dtype=torch.float64)
    for i, j in combinations_with_replacement(range(len(features)), 2):
        part = _hsic(centred[i], centred[j])
        found[ends[i] : ends[i + 1], ends[j] : ends[j + 1]] = part
        found[ends[j] : ends[j + 1], ends[i] : ends[i + 1]] = part.T
    lengths = found.diagonal().sqrt()
    return found / (lengths[:, None] * lengths)


def _hsic(x: Tensor, y: Tensor) -> Tensor:
    """Return n * (n - 3) times the unbiased HSIC of heads, float64 [heads of x, heads of y].

    x and y are the outputs of two layers for n tokens, [n, heads, width]. The factor n * (n - 3)
    cancels in CKA. The kernel matrix of a head is X X^T with its diagonal set to zero, where X is
    its output [n, width]. The kernel matrices [n, n] are not stored.
    """
    n = len(x)
    (x_diagonal, x_sums), (y_diagonal, y_sums) = _diagonal_and_sums(x), _diagonal_and_sums(y)
    products = torch.einsum("nhd,nge->hgde", x, y)
    trace = products.double().square().sum((2, 3)) - x_diagonal.T @ y_diagonal
    totals = x_sums.sum(0)[:, None] * y_sums.sum(0) / ((n - 1) * (n - 2))
    return trace + totals - 2 / (n - 2) * (x_sums.T @ y_sums)


def _diagonal_and_sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the diagonal of each X X^T, and the row sums without the diagonal, both [n, heads]."""
    diagonal = x.double().square().sum(2)
    return diagonal, torch.einsum("nhd,hd->nh", x.double(), x.double().sum(0)) - diagonal


def head_importance(model: Model, ids: Sequence[int], heads: int) -> Tensor:
    """Return the importance |dL / dxi| of every head (Michel et al.), float64 [layers, heads].

    xi = 1 is a factor by which a head's output is multiplied. L is the mean loss of the text's
    tokens after the first. A backward pass with the logits of all tokens must fit into the memory.
    """
    network = model.network
    factors = [
        torch.ones(heads, 1, dtype=network.dtype, device=model.device, requires_grad=True)
        for _ in layers(model)
    ]

    def multiply(factor: Tensor, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        return ((args[0].unflatten(-1, (heads, -1)) * factor).flatten(-2),)

    with torch.enable_grad(), ExitStack() as stack:
        for layer, factor in zip(layers(model), factors, strict=True):
            hook = _projection(layer).register_forward_pre_hook(partial(multiply, factor))
            stack.callback(hook.remove)
        batch = model.batch(ids)
        loss = network(batch, labels=batch, use_cache=False).loss
        found = torch.stack(torch.autograd.grad(loss, factors)).squeeze(2).double().abs().cpu()
    if not found.isfinite().all():
        raise NotFiniteError("a gradient of a head is not finite")
    return found


@contextmanager
def head_outputs(model: Model, heads: int) -> Iterator[list[Tensor]]:
    """Collect the outputs of all heads in the forward passes of a ``with`` block.

    Each forward pass must have a single text. It appends one tensor [tokens, heads, width] per
    layer to the yielded list.
    """
    found: list[Tensor] = []

    def keep(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0][0].unflatten(-1, (heads, -1)))

    with ExitStack() as stack:
        for layer in layers(model):
            stack.callback(_projection(layer).register_forward_pre_hook(keep).remove)
        yield found


def _projection(layer: nn.Module) -> nn.Module:
    attention: nn.Module = layer.self_attn  # type: ignore[assignment]
    return attention.get_submodule("o_proj")
