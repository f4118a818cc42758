"""The page of attention backends, from their registry."""

from collections.abc import Sequence

from diffmegatron.attention.kernels.costs import Sizes
from diffmegatron.attention.kernels.registry import AUTO_ORDER, BACKENDS, FEATURES, OPS, Backend, Op
from tools.reference.markdown import code, head, joined, table

_INTRODUCTION = """\
`training.attention_backend` names a backend, and the attention functions have the argument
`backend`. [kernels.md](../kernels.md) explains them.

- Multiply-adds are those of one (query, key) pair and signal head, in units of d (`head_dim`),
  forward and backward. A Transformer's head needs 2 and 5. r is the number of signal heads per
  noise head.
- *Saved* are the bytes per query and signal head that the backward pass needs besides q, k, v and
  the result, in bf16 with d = 128 and one signal head per noise head and per key-value head.
- A backend lacks the features named in the last column. If it lists compute capabilities (9.x is
  Hopper, 10.x Blackwell), it supports no others."""
_ONE_MAP = "softmax"


def page() -> str:
    """Return the page docs/reference/backends.md."""
    parts = [
        head("Attention backends", "backends", _INTRODUCTION),
        "## Features",
        table(
            ("feature", "without it, a backend cannot"),
            [(code(name), words) for name, words in FEATURES.items()],
        ),
    ]
    for op, backends in BACKENDS.items():
        columns = ("name", "method", "multiply-adds", "saved", "supports", "library", "lacks")
        rows = [_row(op, name, backend) for name, backend in backends.items()]
        orders = [
            f"on {device}: {', '.join(map(code, names))}"
            for device, names in AUTO_ORDER[op].items()
        ]
        parts += [
            f"## {OPS[op].capitalize()}",
            f"`auto` takes the first that can run; {'; '.join(orders)}.",
            table(columns, rows),
        ]
    return joined(parts)


def _row(op: Op, name: str, backend: Backend) -> tuple[str, ...]:
    supports = [
        " or ".join(backend.devices or ("any device",)),
        ", ".join(backend.dtypes or ("any float dtype",)),
        f"d {_numbers(backend.head_dims)}" if backend.head_dims else "any d",
        *(f"{dtype}: d {_numbers(each)}" for dtype, each in backend.dtype_head_dims.items()),
        *(f"{chip}.x: d up to {most}" for chip, most in backend.chips.items()),
    ]
    return (
        code(name),
        f"{backend.note}{'; computes hidden pairs' if backend.computes_hidden_pairs else ''}",
        "" if op == "subtraction" else _work(op, backend),
        "" if op == "subtraction" else _saved(op, backend),
        "; ".join(supports),
        code(backend.library or ""),
        ", ".join(sorted(backend.lacks)),
    )


def _sizes(op: Op, signal: int, noise: int) -> Sizes:
    noise = 0 if op == _ONE_MAP else noise
    return Sizes(2, 128, signal, noise, kv_heads=1, keys=1)


def _work(op: Op, backend: Backend) -> str:
    """Return the multiply-adds per signal head: with r = 1, and with r = 4 for two maps."""
    found = []
    for ratio in (1,) if op == _ONE_MAP else (1, 4):
        sizes = _sizes(op, ratio, 1)
        forward, backward = (
            each / sizes.head_dim / sizes.signal_heads for each in backend.work(sizes)
        )
        words = f"{forward:g} / {backward:g}"
        found.append(words if ratio == 1 else f"r = {ratio}: {words}")
    return "; ".join(found)


def _saved(op: Op, backend: Backend) -> str:
    if backend.computes_hidden_pairs:
        return "all maps"
    return f"{backend.saved(_sizes(op, 1, 1)):,.0f}"


def _numbers(values: Sequence[int]) -> str:
    first, *_, last = values
    if values == tuple(range(first, last + 1, first)):
        return f"multiples of {first} up to {last}"
    return ", ".join(map(str, values))
