"""Statistics of a network's heads over one text, as in the figures of DEX (Kong et al., 2025).

A score is an entry of a head's map for a token and a visible token. docs/evaluation.md defines
every measure.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations_with_replacement

import torch
from torch import Tensor, nn

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation.captured_attention import Layer, layers, row_blocks
from diffmegatron.evaluation.model import Model

MAPS, HEADS = "two maps of a head", "two heads of a layer"
TOP, IN_TOP, IN_REST = "overlap of top tokens", "overlap of top scores", "overlap of other scores"
NEAR_ZERO = "share of |scores| below "
ENTROPY, FIRST_ENTROPY, SECOND_ENTROPY = "entropy", "entropy, first map", "entropy, second map"
NEGATIVE, NEGATIVE_MASS = "share of negative scores", "negative share of |scores|"

# A number for each layer, by measure.
ByLayer = dict[str, list[float]]


@torch.no_grad()
def map_statistics(
    seen: Sequence[Layer], top: float, epsilons: Sequence[float]
) -> tuple[ByLayer, Tensor]:
    """Return means over the rows and heads of every layer, and distances between all heads.

    Memory holds the maps of all layers for one block of rows.

    Args:
        seen: layers of a forward pass, in order.
        top: share of a row's tokens that are its top tokens. Rows with less than one top token are
            left out.
        epsilons: thresholds for scores near zero.

    Returns:
        The means, and 1 - cosine of the maps of every two heads, float64 [heads, heads] in the
        order of the layers.

    Raises:
        NotFiniteError: a score is not finite.
    """
    rows, queries = seen[0].rows, sum(len(call.query) for each in seen for call in each.calls)
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
                # Sum over the rows, and their number.
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
    block: "_Block", layer: Layer, softmax: Tensor, maps: Tensor, epsilons: Sequence[float]
) -> Iterator[tuple[str, Tensor]]:
    """Yield every measure of a layer's rows: [heads, rows], or [pairs of heads, rows]."""
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
    if pairs := layer.variant.map_pairs:
        signal, noise = (softmax[[pair[side] for pair in pairs]] for side in (0, 1))
        yield FIRST_ENTROPY, _entropy(signal)
        yield SECOND_ENTROPY, _entropy(noise)
        yield from _overlaps(block, signal, noise)


def _overlaps(block: "_Block", signal: Tensor, noise: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the overlaps of the two maps of each head, given as [heads, rows, keys]."""
    one, other = block.tops(signal), block.tops(noise)
    both = (one * other).sum(2)[:, block.skipped :]
    yield f"{TOP}, {MAPS}", both / block.counts[block.skipped :]
    smaller, larger, either = signal.minimum(noise), signal.maximum(noise), one.maximum(other)
    for name, chosen in ((IN_TOP, either), (IN_REST, 1 - either)):
        shares = (smaller * chosen).sum(2) / (larger * chosen).sum(2)
        yield f"{name}, {MAPS}", shares[:, block.skipped :].nan_to_num(0)


def _entropy(sizes: Tensor) -> Tensor:
    """Return the entropy in nats of rows that are normalised to sum to 1."""
    return torch.special.entr(sizes / sizes.sum(2, keepdim=True)).sum(2)


class _Block:
    """Rows from ``first`` to ``end`` of square maps; row n has n + 1 scores."""

    def __init__(self, first: int, end: int, top: float, device: torch.device) -> None:
        self._lengths = torch.arange(first, end, device=device) + 1
        # Number of top tokens of each row. The rows without top tokens come first.
        self.counts = (self._lengths.double() * top + 1e-9).floor().long()
        self.skipped = int((self.counts == 0).sum())
        self._earlier = torch.arange(end, device=device) < self._lengths[:, None]

    def share(self, chosen: Tensor) -> Tensor:
        """Return the share of each row's scores that ``chosen`` [heads, rows, keys] contains."""
        return (chosen & self._earlier).sum(2) / self._lengths

    def tops(self, sizes: Tensor) -> Tensor:
        """Return 1 for the top tokens of each row and 0 for other tokens, [heads, rows, keys]."""
        most = max(1, int(self.counts[-1]))
        places = sizes.masked_fill(~self._earlier, -torch.inf).topk(most, dim=2).indices
        is_top = torch.arange(most, device=sizes.device) < self.counts[:, None]
        return torch.zeros_like(sizes).scatter(2, places, is_top.expand_as(places).to(sizes.dtype))


@torch.no_grad()
def feature_alignment(features: Sequence[Tensor]) -> Tensor:
    """Return the linear CKA between the outputs of every two heads, by the unbiased HSIC.

    It follows equation 3 of Nguyen, Raghu, Kornblith (2021), without matrices of tokens by tokens.

    Args:
        features: outputs of the heads of every layer, [tokens, heads, width].

    Returns:
        CKA of every two heads, float64 [heads, heads] in the order of the layers.
    """
    # A constant added to all tokens does not change HSIC, but would cost precision in float32.
    centred = [x.float() - x.float().mean(0) for x in features]
    kernels = [_Kernels(x) for x in centred]
    ends = torch.tensor([0, *(x.shape[1] for x in features)]).cumsum(0).tolist()
    found = features[0].new_zeros(ends[-1], ends[-1], dtype=torch.float64)
    for i, j in combinations_with_replacement(range(len(features)), 2):
        part = kernels[i].hsic(kernels[j])
        found[ends[i] : ends[i + 1], ends[j] : ends[j + 1]] = part
        found[ends[j] : ends[j + 1], ends[i] : ends[i + 1]] = part.T
    lengths = found.diagonal().sqrt()
    return found / (lengths[:, None] * lengths)


class _Kernels:
    """Kernel matrices K = X X^T with a zero diagonal, of every head's X [tokens, width]."""

    def __init__(self, x: Tensor) -> None:
        self._x = x
        # Diagonals of X X^T, and sums of the rows of K: float64 [tokens, heads].
        self._diagonal = x.double().square().sum(2)
        self._sums = torch.einsum("nhd,hd->nh", x.double(), x.double().sum(0)) - self._diagonal

    def hsic(self, other: "_Kernels") -> Tensor:
        """Return the unbiased HSIC without its factor 1 / (n (n - 3)): [heads, other's heads]."""
        n = len(self._x)
        products = torch.einsum("nhd,nge->hgde", self._x, other._x)
        trace = products.double().square().sum((2, 3)) - self._diagonal.T @ other._diagonal
        totals = self._sums.sum(0)[:, None] * other._sums.sum(0) / ((n - 1) * (n - 2))
        return trace + totals - 2 / (n - 2) * (self._sums.T @ other._sums)


def head_importance(model: Model, ids: Sequence[int], heads: int) -> Tensor:
    """Return |dL / dxi| for factors xi = 1 on the heads' outputs (Michel et al., 2019).

    It needs the memory of a backward pass with all logits.

    Args:
        model: model of the heads.
        ids: ids of a text; L is the mean loss of its tokens after the first.
        heads: number of heads of a layer.

    Returns:
        Importance of every head, float64 [layers, heads].

    Raises:
        NotFiniteError: a gradient is not finite.
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
    """Collect the heads' inputs to every layer's output projection, [tokens, heads, width]."""
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
