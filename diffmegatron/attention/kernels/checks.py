"""Checks of the arguments of public functions; each error names the argument that is wrong."""

from torch import Tensor

from .maps import QKV


def check_maps(maps: QKV) -> None:
    """Raise ValueError unless shapes, dtypes and devices fit attention with one or two maps."""
    count = len(maps.queries)
    if count not in (1, 2) or len(maps.keys) != count:
        raise ValueError(
            f"maps has {count} queries and {len(maps.keys)} keys; "
            "it must have one of each, or two for differential attention"
        )
    names = ("q", "k", "v") if count == 1 else ("q1", "k1", "q2", "k2", "v")
    tensors = dict(zip(names, maps.arguments(), strict=True))
    check_tensors(**tensors)
    (q, k), v = names[:2], maps.v
    check_layout(**{q: tensors[q], k: tensors[k]}, v=v, value_width=count)
    if count == 2:
        k1, k2 = maps.keys
        if k2.shape != k1.shape:
            raise ValueError(f"k2 has shape {shape_of(k2)}; it must equal k1's {shape_of(k1)}")
        _check_noise_queries(maps.queries[1], maps.queries[0], k1.shape[2])
    _check_same_kind(**tensors)


def _check_noise_queries(q2: Tensor, q1: Tensor, kv_heads: int) -> None:
    heads = q2.shape[2] if q2.dim() == 4 else 0
    if heads == 0 or q2.shape != (*q1.shape[:2], heads, q1.shape[3]):
        raise ValueError(
            f"q2 has shape {shape_of(q2)}; it must equal q1's {shape_of(q1)} except for the "
            "number of heads"
        )
    if q1.shape[2] % heads:
        raise ValueError(
            f"q2 has {heads} heads, which do not divide the {q1.shape[2]} of q1; equally many "
            "signal heads must share each"
        )
    if heads % kv_heads:
        raise ValueError(
            f"q2 has {heads} heads, not a multiple of the {kv_heads} kv heads of k1; signal heads "
            "that share a noise head must share their kv head"
        )


def check_noise_groups(name: str, heads: Tensor, lambda_: Tensor, kv_heads: int = 1) -> None:
    """Raise ValueError unless `heads` consists of equal groups, and `lambda_` fits `heads`.

    A group has r signal heads, followed by their noise head. With h signal heads, `heads` is
    `[batch, length, h + h / r, width]` and `lambda_` `[batch, length, h]`. All heads of a group
    must attend to the same kv head. Messages call `heads` by `name`.
    """
    check_tensors(**{name: heads, "lambda_": lambda_})
    if heads.dim() != 4 or 0 in heads.shape or not heads.is_floating_point():
        raise ValueError(
            f"{name} has shape {shape_of(heads)} and dtype {heads.dtype}; it must be "
            "floating-point [batch, length, heads, width] without empty dimensions"
        )
    if lambda_.dim() != 3 or lambda_.shape[:2] != heads.shape[:2]:
        raise ValueError(
            f"lambda_ has shape {shape_of(lambda_)}; with {name} {shape_of(heads)} it must be "
            f"{[*heads.shape[:2]]} and the number of signal heads"
        )
    if not lambda_.is_floating_point() or lambda_.device != heads.device:
        raise ValueError(
            f"lambda_ is {lambda_.dtype} on {lambda_.device}; it must be floating-point on "
            f"{heads.device}, where {name} is"
        )
    signal, noise = lambda_.shape[2], heads.shape[2] - lambda_.shape[2]
    if noise < 1 or signal < 1 or signal % noise:
        raise ValueError(
            f"{name} has {heads.shape[2]} heads and lambda_ {signal}, so there are {noise} noise "
            "heads; the number of signal heads must be a multiple of theirs"
        )
    if noise % kv_heads:
        raise ValueError(
            f"{name} has {noise} groups of {signal // noise} signal heads and a noise head, not a "
            f"multiple of the {kv_heads} kv heads of k; a group must not lie across two kv heads"
        )


def check_lambda(lambda_: Tensor, like: Tensor) -> None:
    """Raise ValueError unless lambda is a 0-dim floating-point tensor on the device of `like`."""
    check_tensors(lambda_=lambda_)
    if lambda_.dim() != 0 or not lambda_.is_floating_point():
        raise ValueError(
            f"lambda_ has shape {shape_of(lambda_)} and dtype {lambda_.dtype}; "
            "it must be a 0-dim floating-point tensor; for one per head, or per token and head, "
            "call diff_attention_v2 with lambda_ [b, s, h]"
        )
    if lambda_.device != like.device:
        raise ValueError(f"lambda_ is on {lambda_.device} but q1 on {like.device}")


def check_tensors(**arguments: object) -> None:
    """Raise ValueError unless all arguments are tensors."""
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} is of type {type(x).__name__}; it must be a tensor")


def check_layout(*, v: Tensor, value_width: int, **queries_and_keys: Tensor) -> None:
    """Raise ValueError unless the shapes of one map's queries, keys and values fit together.

    `value_width` is the required width of v divided by the width of the queries.
    `queries_and_keys` are first the queries and then the keys, by name (e.g. q1 and k1).
    """
    (q_name, q), (k_name, k) = queries_and_keys.items()
    for name, x in ((q_name, q), (k_name, k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {shape_of(x)}; it must be [batch, length, heads, width] "
                "without empty dimensions"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"{k_name} has shape {shape_of(k)}; its batch and width must equal those of "
            f"{q_name} {shape_of(q)}"
        )
    expected = (*k.shape[:3], value_width * q.shape[3])
    if v.shape != expected:
        raise ValueError(
            f"v has shape {shape_of(v)}; with {q_name} {shape_of(q)} and {k_name} {shape_of(k)} "
            f"it must be {list(expected)}"
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q_name} has {q.shape[2]} heads, not a multiple of the {k.shape[2]} kv heads of "
            f"{k_name} (shapes {shape_of(q)} and {shape_of(k)})"
        )


def _check_same_kind(**tensors: Tensor) -> None:
    (first_name, first), *rest = tensors.items()
    if not first.is_floating_point():
        raise ValueError(f"{first_name} has dtype {first.dtype}; it must be floating-point")
    for name, x in rest:
        if x.dtype != first.dtype:
            raise ValueError(f"{name} is {x.dtype} but {first_name} is {first.dtype}")
        if x.device != first.device:
            raise ValueError(f"{name} is on {x.device} but {first_name} on {first.device}")


def shape_of(x: Tensor) -> list[int]:
    """Return the shape as a list, for messages."""
    return list(x.shape)
