"""What the attention functions refuse, and that the error names the argument and the shapes."""

import pytest
import torch

from diffmegatron.attention.kernels import diff_attention, softmax_attention


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
