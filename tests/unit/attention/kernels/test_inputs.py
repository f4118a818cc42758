"""The attention functions refuse wrong arguments; the error names the argument and the shapes."""

import pytest
import torch

from diffmegatron.attention.kernels.api import (
    QKV,
    HeadwiseNorm,
    WholeAttention,
    chunk_gradients,
    diff_attention,
    diff_attention_v2,
    merge_maps,
    softmax_attention,
    subtract_noise,
)


def inputs(**replaced):
    tensors = {
        "q1": torch.zeros(2, 6, 4, 8),
        "k1": torch.zeros(2, 6, 2, 8),
        "q2": torch.zeros(2, 6, 4, 8),
        "k2": torch.zeros(2, 6, 2, 8),
        "v": torch.zeros(2, 6, 2, 16),
        "lambda_": torch.tensor(0.5),
    }
    return {**tensors, **replaced}


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"q1": torch.zeros(6, 4, 8)}, r"q1 has shape \[6, 4, 8\]"),
        ({"q1": torch.zeros(2, 0, 4, 8)}, r"q1 has shape \[2, 0, 4, 8\].*empty"),
        ({"k1": torch.zeros(1, 6, 2, 8)}, r"k1 has shape \[1, 6, 2, 8\].*q1 \[2, 6, 4, 8\]"),
        ({"k1": torch.zeros(2, 6, 2, 4)}, r"k1 has shape .*width"),
        ({"v": torch.zeros(2, 6, 2, 8)}, r"v has shape .* must be \[2, 6, 2, 16\]"),
        ({"v": torch.zeros(2, 5, 2, 16)}, r"v has shape \[2, 5, 2, 16\]"),
        ({"q2": torch.zeros(2, 5, 4, 8)}, r"q2 has shape .* q1's \[2, 6, 4, 8\]"),
        ({"k2": torch.zeros(2, 6, 4, 8)}, r"k2 has shape .* k1's"),
        ({"q2": torch.zeros(2, 6, 8)}, r"q2 has shape \[2, 6, 8\].* q1's"),
        ({"q2": torch.zeros(2, 6, 0, 8)}, r"q2 has shape \[2, 6, 0, 8\].* q1's"),
        ({"q2": torch.zeros(2, 6, 3, 8)}, "q2 has 3 heads, which do not divide the 4 of q1"),
        ({"q2": torch.zeros(2, 6, 8, 8)}, "q2 has 8 heads, which do not divide the 4 of q1"),
        ({"q2": torch.zeros(2, 6, 1, 8)}, "q2 has 1 heads, not a multiple of the 2 kv heads of k1"),
        ({"q1": torch.zeros(2, 6, 3, 8)}, "q1 has 3 heads, not a multiple of the 2 kv heads"),
        ({"v": torch.zeros(2, 6, 2, 16).bfloat16()}, "v is torch.bfloat16 but q1 is"),
        ({"k1": torch.zeros(2, 6, 2, 8, device="meta")}, "k1 is on meta but q1 on cpu"),
        ({"lambda_": torch.zeros(1)}, r"lambda_ has shape \[1\]"),
        ({"lambda_": torch.tensor(1)}, "lambda_ has .* torch.int64"),
        ({"lambda_": torch.tensor(1.0, device="meta")}, "lambda_ is on meta but q1 on cpu"),
    ],
)
def test_diff_attention_refuses(replaced, message):
    with pytest.raises(ValueError, match=message):
        diff_attention(**inputs(**replaced))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 4, 4, 6])}, "increase strictly"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, 6])}, r"cu_seqlens of shape \[4\].*increase"),
        ({"cu_seqlens": torch.tensor([1, 6])}, "start at 0"),
        ({"cu_seqlens": torch.tensor([0.0, 6.0])}, "cu_seqlens has .*torch.float32"),
        ({"cu_seqlens": torch.tensor([[0, 6]])}, r"cu_seqlens has shape \[1, 2\]"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "query_offset=0 with 6 positions .* 0 to 5"),
        ({"cu_seqlens": torch.tensor([0, 6]), "query_offset": -1}, "query_offset=-1"),
        ({"cu_seqlens": torch.tensor([0, 9]), "query_offset": 0, "key_offset": 4}, "key_offset=4"),
        ({"backend": "flashy"}, "backend='flashy' is unknown; choose auto or"),
    ],
)
def test_options_refused(options, message):
    with pytest.raises(ValueError, match=message):
        diff_attention(**inputs(), **options)


def test_integer_queries_refused():
    whole = {name: x.long() for name, x in inputs().items() if name != "lambda_"}
    with pytest.raises(ValueError, match=r"q1 has dtype torch\.int64"):
        diff_attention(**whole, lambda_=torch.tensor(0.5))


def test_softmax_attention_refuses_wide_values():
    q, k, v = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8), torch.zeros(2, 6, 2, 16)
    with pytest.raises(ValueError, match=r"v has shape .* must be \[2, 6, 2, 8\]"):
        softmax_attention(q, k, v)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softmax_scale": 0.0}, r"softmax_scale is 0\.0; it must be a finite number above 0"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({"softmax_scale": "1"}, "softmax_scale is '1'"),
        ({"query_offset": 1.5}, r"query_offset is 1\.5; it must be an integer"),
        ({"key_offset": 2**40}, "key_offset is 1099511627776"),
        ({"window": 0}, "window is 0; it must be an integer of 1 or more, or None"),
        ({"window": 2.0}, r"window is 2\.0"),
        ({"window": True}, "window is True"),
        ({"window": 4, "causal": False}, "window is 4 with causal=False"),
        ({"cu_seqlens": [0, 6]}, "cu_seqlens is of type list; it must be a tensor"),
    ],
)
@pytest.mark.parametrize("backend", ["auto", "sdpa_4call"])
def test_numbers_refused(options, message, backend):
    with pytest.raises(ValueError, match=message):
        diff_attention(**inputs(), backend=backend, **options)


@pytest.mark.parametrize("name", ["q1", "k1", "q2", "k2", "v", "lambda_"])
def test_an_argument_of_type_float_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is of type float; it must be a tensor"):
        diff_attention(**inputs(**{name: 0.4}))


def test_a_negative_eps_is_refused():
    with pytest.raises(ValueError, match=r"norm\.eps is -1"):
        diff_attention(**inputs(), norm=HeadwiseNorm(None, -1, 1.0))


def test_a_scalar_query_is_refused():
    with pytest.raises(ValueError, match=r"q has shape \[\]"):
        softmax_attention(torch.zeros(()), torch.zeros(()), torch.zeros(()))


def test_merging_chunks_of_different_queries_is_refused():
    out, lse = torch.zeros(1, 6, 2, 8), torch.zeros(1, 6, 2)
    for outs, lses in (
        ([], []),
        ([out, out[..., :1]], [lse, lse]),
        ([out, out], [lse]),
        ([out], [lse[..., :1]]),
    ):
        with pytest.raises(ValueError, match="of the same queries, one of each per chunk"):
            merge_maps(outs, lses)


def whole(**replaced):
    out, lse = torch.zeros(2, 6, 4, 16), torch.zeros(2, 6, 4)
    return WholeAttention(**{"out": out, "out2": out, "lses": (lse, lse), **replaced})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lambda_": torch.ones(16)}, r"lambda_ has shape \[16\].*call diff_attention_v2"),
        ({"lambda_": 0.4}, "lambda_ is of type float"),
        ({"lambda_": None}, "lambda_ is None"),
        ({"grad": torch.zeros(2, 6, 4, 16, device="meta")}, "grad is torch.float32 on meta"),
        ({"grad": torch.zeros(2, 6, 4, 16).long()}, "grad is torch.int64"),
        ({"grad": torch.zeros(2, 6, 4, 8)}, r"grad has shape \[2, 6, 4, 8\]"),
        ({"whole": whole(out2=torch.zeros(1, 6, 4, 16))}, r"whole\.out2 has shape \[1, 6, 4, 16\]"),
        ({"whole": whole(lses=(torch.zeros(2, 6, 4),))}, r"whole\.lses has 1 tensors"),
        (
            {"whole": whole(lses=(torch.zeros(2, 6, 4), torch.zeros(2, 4, 6)))},
            r"whole\.lses\[1\] has shape \[2, 4, 6\]",
        ),
    ],
)
def test_chunk_gradients_refuses(given, message):
    tensors = inputs()
    maps = QKV((tensors["q1"], tensors["q2"]), (tensors["k1"], tensors["k2"]), tensors["v"])
    call = {"grad": torch.zeros(2, 6, 4, 16), "lambda_": torch.tensor(0.5), "whole": whole()}
    call |= given
    with pytest.raises(ValueError, match=message):
        chunk_gradients(call["grad"], maps, call["lambda_"], call["whole"])


def v2_inputs(**replaced):
    tensors = {
        "q": torch.zeros(2, 6, 8, 8),
        "k": torch.zeros(2, 6, 2, 8),
        "v": torch.zeros(2, 6, 2, 8),
        "lambda_": torch.zeros(2, 6, 6),
    }
    return {**tensors, **replaced}


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"q": torch.zeros(2, 6, 7, 8)}, "q has 7 heads, not a multiple of the 2 kv heads of k"),
        (
            {"lambda_": torch.tensor(0.5)},
            r"lambda_ has shape \[\]; .* must be \[2, 6\] and the",
        ),
        (
            {"lambda_": torch.zeros(2, 5, 6)},
            r"lambda_ has shape \[2, 5, 6\]; with q \[2, 6, 8",
        ),
        (
            {"lambda_": torch.zeros(2, 6, 5)},
            "q has 8 heads and lambda_ 5, so there are 3 noise heads",
        ),
        ({"lambda_": torch.zeros(2, 6, 8)}, "q has 8 heads and lambda_ 8"),
        ({"lambda_": torch.zeros(2, 6, 0)}, "q has 8 heads and lambda_ 0"),
        ({"lambda_": torch.zeros(2, 6, 3)}, "q has 8 heads and lambda_ 3"),
        ({"lambda_": torch.zeros(2, 6, 6).long()}, r"lambda_ is torch\.int64"),
        ({"lambda_": torch.zeros(2, 6, 6, device="meta")}, "lambda_ is .* on meta"),
        ({"lambda_": 0.5}, "lambda_ is of type float"),
        (
            {"k": torch.zeros(2, 6, 4, 8), "v": torch.zeros(2, 6, 4, 8)},
            "q has 2 groups of 3 signal heads and a noise head, not a multiple of the 4 kv heads",
        ),
        ({"v": torch.zeros(2, 6, 2, 16)}, r"v has shape .* must be \[2, 6, 2, 8\]"),
    ],
)
def test_diff_attention_v2_refuses(replaced, message):
    with pytest.raises(ValueError, match=message):
        diff_attention_v2(**v2_inputs(**replaced))


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (torch.zeros(2, 6, 8), r"heads has shape \[2, 6, 8\]"),
        (torch.zeros(2, 6, 8, 8).long(), r"heads has shape .* dtype torch\.int64"),
        (torch.zeros(2, 6, 6, 8), "heads has 6 heads and lambda_ 6"),
        (0.5, "heads is of type float"),
    ],
)
def test_subtract_noise_refuses(heads, message):
    with pytest.raises(ValueError, match=message):
        subtract_noise(heads, torch.zeros(2, 6, 6))


@pytest.mark.parametrize(
    "attend",
    [
        lambda name: softmax_attention(*(torch.zeros(1, 2, 1, 8) for _ in range(3)), backend=name),
        lambda name: diff_attention_v2(**v2_inputs(), backend=name),
        lambda name: subtract_noise(torch.zeros(1, 2, 2, 8), torch.zeros(1, 2, 1), backend=name),
    ],
    ids=["softmax", "v2", "subtraction"],
)
def test_a_backend_of_another_operation_is_unknown(attend):
    with pytest.raises(ValueError, match="backend='flash_2call' is unknown; choose auto or"):
        attend("flash_2call")
