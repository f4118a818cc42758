"""Calls of kernels with inputs as a training step passes them.

In shapes b is the batch size, s the number of queries, t the number of keys, h the number of signal
heads, h_kv the number of key-value heads, and d the width of a query.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from diffmegatron.attention.context_parallel.ring import ring_attention
from diffmegatron.attention.kernels.api import (
    HeadwiseNorm,
    diff_attention,
    softmax_attention,
    subtract_noise,
)
from diffmegatron.attention.kernels.installed_backends import call_of, importable_libraries
from diffmegatron.attention.kernels.registry import BACKENDS, why_not
from diffmegatron.attention.kernels.triton.block_sizes import other_configurations
from diffmegatron.attention.kinds.two_maps import split_maps
from diffmegatron.config.training_config import LossKernel
from diffmegatron.measurements.records import KernelShape
from diffmegatron.model.language_model_loss import cross_entropy, loss_kernels
from diffmegatron.parallel.deterministic import deterministic_algorithms

# Backends that compute the equation literally in plain torch: of attention, and of subtraction.
REFERENCE, _REFERENCE_SUBTRACTION = "reference", "pytorch"
_NORM_EPS, _NORM_SCALE, _LAMBDA = 1e-6, 0.64, 0.7

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class Trial:
    """A differentiable call of an operation, with inputs as a layer passes them.

    Attributes:
        shape: shape of the call.
        inputs: inputs by name, with the strides of training: q1, k1, q2, k2, v, lambda and norm;
            q, k and v; heads and logits of lambda; or the logits of a loss, [1, tokens, 1, ids].
        documents: boundaries of packed documents, or None.
    """

    shape: KernelShape
    inputs: Inputs
    documents: tuple[int, ...] | None

    def call(self, inputs: Inputs, backend: str) -> Tensor:
        """Return the result of a backend, [b, s, h, width of a value]; of a loss the width is 1."""
        if self.shape.operation == "loss":
            return _loss(inputs["logits"], 0, backend)
        if self.shape.operation == "subtraction":
            logits = inputs["logits"]
            return subtract_noise(inputs["heads"], logits, backend=backend, sigmoid=True)
        if self._is_ring:
            attend: Callable[..., Tensor] = partial(ring_attention, cast(Any, _OneRank()), backend)
            masks = {"cu_seqlens": self._boundaries(), "window": self.shape.window}
            return attend(*_heads(inputs), **masks, **_differential(inputs))
        return self._attend(inputs, backend, self.shape.keys - self.shape.length)

    def blocks(self, inputs: Inputs, most_rows: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the equation's result for each block of rows, as (rows, result).

        The results of all blocks have every (query, key) pair once, so the sum of the blocks'
        gradients is the gradient of the whole. A block has at most ``most_rows`` rows.
        """
        length = next(iter(inputs.values())).shape[1]
        offset = 0 if self._is_ring else self.shape.keys - self.shape.length
        for start in range(0, length, most_rows):
            rows = slice(start, min(start + most_rows, length))
            cut = {name: x[:, rows] if _has_rows(name) else x for name, x in inputs.items()}
            if self.shape.operation == "loss":
                yield rows, _loss(cut["logits"], start, REFERENCE)
            elif self.shape.operation == "subtraction":
                yield rows, self.call(cut, _REFERENCE_SUBTRACTION)
            else:
                yield rows, self._attend(cut, REFERENCE, offset + start)

    def sums(self) -> AbstractContextManager[None]:
        """Return a context in which sums have the order that the shape needs."""
        return deterministic_algorithms() if self.shape.is_deterministic else nullcontext()

    def scaled_logits(self, factor: float) -> "Trial":
        """Return the trial with queries, or a loss's logits, that are multiplied by a factor."""
        scaled = {n: factor * x for n, x in self.inputs.items() if n.startswith(("q", "logits"))}
        return replace(self, inputs={**self.inputs, **scaled})

    def last_group(self) -> "Trial":
        """Return the trial with the last sequence and the last group of heads only."""
        shape = self.shape
        groups = _groups(shape)
        heads = (shape.signal_heads, shape.noise_heads, shape.kv_heads)
        signal, noise, kv = (count // groups for count in heads)
        update = {"batch": 1, "signal_heads": signal, "noise_heads": noise, "kv_heads": kv}
        inputs = {name: last_group(x, shape) for name, x in self.inputs.items()}
        return replace(self, shape=shape.model_copy(update=update), inputs=inputs)

    @property
    def _is_ring(self) -> bool:
        return "chunks" in self.shape.features

    def _attend(self, inputs: Inputs, backend: str, offset: int) -> Tensor:
        shape = self.shape
        has_two_maps = shape.operation == "differential"
        attend: Callable[..., Tensor] = diff_attention if has_two_maps else softmax_attention
        masks = {
            "cu_seqlens": self._boundaries(),
            "query_offset": offset,
            "window": shape.window,
        }
        return attend(*_heads(inputs), **masks, backend=backend, **_differential(inputs))

    def _boundaries(self) -> Tensor | None:
        return None if self.documents is None else torch.tensor(self.documents)


def draw_trial(shape: KernelShape, device: torch.device) -> Trial:
    """Return a trial with random inputs, which are equal in every call.

    Within packed documents, the first three documents have one token each.
    """
    with same_numbers(device):
        return _draw(shape, device)


@contextmanager
def same_numbers(device: torch.device, seed: int = 0) -> Iterator[None]:
    """Make torch draw the same random numbers in every such context; keep its own state."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _draw(shape: KernelShape, device: torch.device) -> Trial:
    normal = partial(torch.randn, device=device, dtype=getattr(torch, shape.dtype))
    if shape.operation == "subtraction":
        heads = shape.signal_heads + shape.noise_heads
        logits = normal(shape.length, shape.batch, shape.signal_heads).transpose(0, 1)
        outputs = normal(shape.batch, shape.length, heads, shape.head_dim)
        return Trial(shape, {"heads": outputs, "logits": logits}, None)
    if shape.operation == "loss":
        return Trial(shape, {"logits": normal(1, shape.length, 1, shape.head_dim)}, None)
    chunks = 2 if "chunks" in shape.features else 1
    queries, keys = chunks * shape.length, chunks * shape.keys
    signal, noise = (n // shape.kv_heads for n in (shape.signal_heads, shape.noise_heads))
    rows_of_key = signal + noise + (4 if noise else 2)
    mixed = normal(keys, shape.batch, shape.kv_heads, rows_of_key, shape.head_dim)
    found = _two_maps(mixed, signal, noise) if noise else _one_map(mixed, signal)
    inputs = {name: x[:, -queries:] if _has_rows(name) else x for name, x in found.items()}
    if noise:
        inputs["lambda"] = torch.tensor(_LAMBDA, device=device)
    if shape.has_norm:
        width = 2 * shape.head_dim
        inputs["norm"] = 1 + 0.1 * torch.randn(width, device=device)
    documents = None
    if "documents" in shape.features:
        ends = {0, 1, 2, 3, keys // 7, keys // 3, keys // 3 + 1, keys // 2, keys}
        documents = tuple(sorted(each for each in ends if each <= keys))
    return Trial(shape, inputs, documents)


def last_group(x: Tensor, shape: KernelShape) -> Tensor:
    """Return the view of an input or result of the last sequence and the last group of heads.

    A group has the heads of one key-value head, or of a subtraction one noise head. Tensors without
    heads are returned unchanged.
    """
    if x.dim() < 3:
        return x
    return x[-1:, :, -(x.shape[2] // _groups(shape)) :]


def _groups(shape: KernelShape) -> int:
    return shape.kv_heads or shape.noise_heads


def _one_map(mixed: Tensor, queries: int) -> dict[str, Tensor]:
    """Return q, k and v of the output of ``linear_qkv``, [t, b, h_kv, queries + 2, d].

    The rotary embedding copies queries and keys, and v stays a view of the output.
    """
    q, k, v = mixed.split([queries, 1, 1], dim=3)
    by_name = {"q": q.clone(), "k": k.clone(), "v": v}
    return {name: x.flatten(2, 3).transpose(0, 1) for name, x in by_name.items()}


def _two_maps(mixed: Tensor, signal: int, noise: int) -> dict[str, Tensor]:
    """Return q1, k1, q2, k2 and v of the output of ``linear_qkv``.

    The output is [t, b, h_kv, signal + noise + 4, d], in the layout of `two_maps.TwoMaps`.
    """
    q1, k1, v1, q2, k2, v2 = mixed.split([signal, 1, 1, noise, 1, 1], dim=3)
    query, key, value = (
        torch.cat(pair, dim=3).flatten(2, 3).transpose(0, 1)
        for pair in ((q1, q2), (k1, k2), (v1, v2))
    )
    return dict(
        zip(
            ("q1", "k1", "q2", "k2", "v"),
            split_maps(query, key, value, signal // noise),
            strict=True,
        )
    )


def _loss(logits: Tensor, first: int, kernel: str) -> Tensor:
    """Return the losses [1, tokens, 1, 1] of logits [1, tokens, 1, ids], the last id padding.

    ``first`` is the number of the first token, which determines its label. The kernel "reference"
    is torch's function, which computes in float32 or wider.
    """
    _, tokens, _, size = logits.shape
    labels = (7919 * torch.arange(first, first + tokens, device=logits.device) + 3) % (size - 1)
    if kernel == REFERENCE:
        wide = logits[0, :, 0, :-1].to(torch.promote_types(logits.dtype, torch.float32))
        losses = torch.nn.functional.cross_entropy(wide, labels, reduction="none")
    else:
        named = cast(LossKernel, kernel)
        # The kernels overwrite the logits.
        (losses,) = cross_entropy(labels[None], logits[0].clone(), None, size - 1, 0.0, named)
    return losses[None, :, None, None]


def usable_backends(shape: KernelShape, device: torch.device) -> list[str]:
    """Return the backends that can compute a shape here; on a GPU without the equations.

    They include other configurations of the Triton kernels. On a GPU the equations in plain torch
    would store all scores, and are never the fastest.
    """
    if shape.operation == "loss":
        return [*loss_kernels(device)]
    like = torch.empty(1, 1, 1, shape.head_dim, dtype=getattr(torch, shape.dtype), device=device)
    call = call_of(shape.operation, like, frozenset(shape.features))
    libraries = importable_libraries()
    names = [n for n in BACKENDS[shape.operation] if why_not(n, call, libraries) is None]
    names = [n for n in names if n != REFERENCE or not like.is_cuda]
    configurable = [n for n in names if BACKENDS[shape.operation][n].configuration is not None]
    others = other_configurations(
        like,
        grouped=0 < shape.noise_heads < shape.signal_heads,
        deterministic=shape.is_deterministic,
    )
    return names + [f"{name}:{each}" for name in configurable for each in others]


class _OneRank:
    """A context-parallel group of one rank, whose ring has both of its chunks."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _has_rows(name: str) -> bool:
    """Return whether dimension 1 of an input has the rows of the result."""
    return name in ("q", "q1", "q2", "heads", "logits")


def _heads(inputs: Inputs) -> list[Tensor]:
    return [x for name, x in inputs.items() if name not in ("lambda", "norm")]


def _differential(inputs: Inputs) -> dict[str, object]:
    if "lambda" not in inputs:
        return {}
    norm = inputs.get("norm")
    found = None if norm is None else HeadwiseNorm(norm, _NORM_EPS, _NORM_SCALE)
    return {"lambda_": inputs["lambda"], "norm": found}
