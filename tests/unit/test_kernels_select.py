"""The choice of a backend: a plain function of device, dtype, head dimension and libraries."""

import logging
import sys
from typing import get_args

import pytest
import torch

from diffmegatron.attention.kernels import backend_table, diff_attention
from diffmegatron.attention.kernels.select import (
    BACKENDS,
    choose_backend,
    importable_libraries,
    resolve_backend,
)
from diffmegatron.config.layout import WHOLE_SEQUENCE_BACKENDS
from diffmegatron.config.schema import AttentionBackend

NOTHING: frozenset[str] = frozenset()


def test_recipes_know_every_backend_and_which_cannot_be_in_a_ring():
    assert get_args(AttentionBackend) == ("auto", *BACKENDS)
    assert {name for name, b in BACKENDS.items() if "chunks" in b.lacks} == WHOLE_SEQUENCE_BACKENDS


def test_auto_on_cpu_is_blocked():
    name, reason = choose_backend("auto", "cpu", torch.float32, 128, NOTHING)
    assert name == "blocked"
    assert "plain PyTorch" in reason


def test_a_named_backend_is_taken():
    assert choose_backend("reference", "cpu", torch.float64, 5, NOTHING)[0] == "reference"


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="choose auto or reference, blocked, triton, flash_2call"):
        choose_backend("fused", "cpu", torch.float32, 128, NOTHING)


def test_choice_is_logged_once(caplog):
    resolve_backend.cache_clear()
    x, v = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 8)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            diff_attention(x, x, x, x, v, torch.tensor(0.5))
    (record,) = [r for r in caplog.records if "differential attention" in r.message]
    assert "blocked (row blocks in plain PyTorch" in record.message


def test_table_lists_every_backend_with_a_reason():
    table = backend_table(device="cpu")
    assert [name for name, _, _ in table] == list(BACKENDS)
    assert all(reason for _, _, reason in table)


def test_triton_is_refused_where_it_cannot_run():
    libraries = frozenset({"triton"})
    for device, dtype, head_dim, available, reason in (
        ("cpu", torch.bfloat16, 128, libraries, "needs a cuda device, got cpu"),
        ("cuda", torch.bfloat16, 128, NOTHING, "needs the library triton"),
        ("cuda", torch.float64, 128, libraries, "takes bfloat16, float16, float32, got float64"),
        ("cuda", torch.bfloat16, 80, libraries, "takes head_dim 64, 96, 128, got 80"),
    ):
        with pytest.raises(ValueError, match=f"backend='triton' cannot run: it {reason}"):
            choose_backend("triton", device, dtype, head_dim, available)
    assert choose_backend("triton", "cuda", torch.bfloat16, 128, libraries)[0] == "triton"


def test_auto_never_takes_kernels_that_no_gpu_has_run():
    libraries = frozenset({"triton"})
    assert choose_backend("auto", "cuda", torch.bfloat16, 128, libraries)[0] != "triton"


@pytest.mark.parametrize(
    ("libraries", "head_dim", "needs", "expected"),
    [
        ({"triton"}, 128, NOTHING, "sdpa_4call"),
        ({"flash_attn"}, 128, NOTHING, "flash_4call"),
        ({"flash_attn", "flex_head_fa"}, 128, NOTHING, "flash_2call"),
        ({"flash_attn", "flex_head_fa"}, 80, NOTHING, "flash_4call"),
        ({"flash_attn", "flex_head_fa"}, 128, {"documents"}, "flash_2call"),
        ({"flash_attn", "flex_head_fa"}, 128, {"offsets"}, "sdpa_4call"),
        ({"flash_attn", "flex_head_fa"}, 128, {"lse"}, "blocked"),
    ],
)
def test_auto_on_cuda(libraries, head_dim, needs, expected):
    choice = choose_backend(
        "auto", "cuda", torch.bfloat16, head_dim, frozenset(libraries), frozenset(needs)
    )
    assert choice[0] == expected


def test_auto_says_what_it_passed_over():
    _, reason = choose_backend("auto", "cuda", torch.bfloat16, 128, frozenset({"flash_attn"}))
    assert (
        "not flash_2call: needs the library flex_head_fa, which is not installed or not usable"
        in reason
    )


def test_a_named_backend_that_lacks_a_feature_says_so():
    with pytest.raises(ValueError, match="'sdpa_4call' cannot run: it cannot return log-sum-exps"):
        choose_backend("sdpa_4call", "cpu", torch.float32, 64, NOTHING, frozenset({"lse"}))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import no_such_cuda_extension", "No module named 'no_such_cuda_extension'"),
        ("def flash_attn_func(q, k, v): ...", "flash_attn unknown has no flash_attn_func with"),
    ],
    ids=["does not load", "too old"],
)
def test_a_library_that_does_not_work_is_passed_over(
    source, complaint, tmp_path, monkeypatch, caplog
):
    (tmp_path / "flash_attn.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    importable_libraries.cache_clear()
    try:
        assert "flash_attn" not in importable_libraries()
    finally:
        importable_libraries.cache_clear()
        sys.modules.pop("flash_attn", None)
    assert complaint in caplog.text


def test_libraries_are_passed_over_on_a_gpu_before_ampere(monkeypatch, caplog):
    pytest.importorskip("triton", reason="any library that is installed will do")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    importable_libraries.cache_clear()
    try:
        assert importable_libraries() == NOTHING
    finally:
        importable_libraries.cache_clear()
    assert "triton is installed but not usable" in caplog.text
    assert "compute capability 8.0 or later, this one has 7.5" in caplog.text
