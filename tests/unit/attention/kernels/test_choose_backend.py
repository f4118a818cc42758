"""The choice of a backend (kernel implementation) of attention.

It depends on device, dtype, head dimension, needed features and installed libraries.
"""

import logging
import subprocess
import sys
from functools import partial

import pytest
import torch

from diffmegatron.attention.kernels import installed_backends
from diffmegatron.attention.kernels.api import backend_table, diff_attention, softmax_attention
from diffmegatron.attention.kernels.installed_backends import (
    importable_libraries,
    installed_backend,
)
from diffmegatron.attention.kernels.registry import (
    AUTO_ORDER,
    BACKENDS,
    DIFFERENTIAL,
    LIBRARIES,
    Call,
    choose_backend,
    needed_features,
    whole_sequence_backends,
    why_not,
)

NOTHING: frozenset[str] = frozenset()
ON_CUDA = Call("differential", "cuda", "bfloat16", 128)
ON_CPU = Call("differential", "cpu", "float32", 128)


def test_flash_cudnn_and_flex_need_the_whole_sequence():
    whole = {"flash_2call", "flash_4call", "flash4_2call", "cudnn_2call", "flex"}
    whole |= {"varlen", "varlen_fa3", "varlen_fa4"}
    assert whole_sequence_backends("differential") == whole


@pytest.mark.parametrize(
    ("name", "chip", "head_dim", "reason"),
    [
        ("flash4_2call", 9, 128, None),
        ("flash4_2call", 10, 64, None),
        ("flash4_2call", 10, 72, "takes head_dim up to 64 on compute capability 10.x, got 72"),
        ("flash4_2call", 8, 64, "needs compute capability 9.x or 10.x, got 8.x"),
        ("varlen_fa3", 10, 64, "needs compute capability 9.x, got 10.x"),
        ("varlen_fa4", 10, 128, None),
        ("varlen_fa4", 9, 256, None),
        ("varlen", 8, 256, None),
        ("varlen_fa3", None, 128, None),
    ],
)
def test_a_chip_limits_the_widths_of_a_backend(name, chip, head_dim, reason):
    call = ON_CUDA._replace(chip=chip, head_dim=head_dim)
    assert why_not(name, call, frozenset(LIBRARIES)) == reason


def test_the_table_loads_without_torch():
    code = (
        "import sys, diffmegatron.attention.kernels.registry as registry\n"
        "sizes = registry.costs.Sizes(2, 64, 8, 8, 8, 512)\n"
        "for table in registry.BACKENDS.values():\n"
        "    [(backend.work(sizes), backend.saved(sizes)) for backend in table.values()]\n"
        "assert not {'torch', 'triton'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_order_names_backends_of_its_operation():
    for op, orders in AUTO_ORDER.items():
        assert {name for order in orders.values() for name in order} <= set(BACKENDS[op])


@pytest.mark.parametrize("op", BACKENDS)
def test_every_backend_has_the_functions_of_its_operation(op):
    for backend in BACKENDS[op].values():
        if backend.library not in (None, "triton"):
            continue
        if backend.library == "triton":
            pytest.importorskip("triton", reason="its module imports it")
        needed = {backend.entry}
        if op != "subtraction" and "chunks" not in backend.lacks:
            needed |= {"attention_with_lse", "chunk_gradients"}
        assert needed <= set(dir(backend.load()))


@pytest.mark.parametrize(
    ("documents", "context", "communication", "needs"),
    [
        (False, 1, None, set()),
        (True, 1, None, {"documents"}),
        (False, 2, "ring", {"chunks"}),
        (True, 2, "ring", {"documents", "offsets", "chunks", "masked chunks"}),
        (False, 2, "all_gather", set()),
        (True, 2, "all_gather", {"documents", "offsets"}),
        (True, 2, "ulysses", {"documents"}),
    ],
)
@pytest.mark.parametrize("windows", [False, True])
def test_a_layout_determines_what_its_kernel_needs(
    documents, windows, context, communication, needs
):
    if windows:
        needs = needs | {"windows"}
        needs |= {"offsets", "masked chunks"} if "chunks" in needs else set()
    layout = {"context": context, "communication": communication}
    assert needed_features(documents=documents, windows=windows, **layout) == needs


@pytest.mark.parametrize("op", ["differential", "softmax"])
def test_a_backend_without_windows_is_never_used_for_them(op):
    needs = frozenset({"windows"})
    lacking = {name for name, each in BACKENDS[op].items() if "windows" in each.lacks}
    others = {"sdpa", "flash4"}
    if op == "differential":
        others = {"sdpa_4call", "cudnn_2call", "flash4_2call"}
    assert lacking == others | {"varlen_fa4"}
    q, v = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8 if op == "softmax" else 16)
    attend = partial(softmax_attention, q, q, v)
    if op == "differential":
        attend = partial(diff_attention, q, q, q, q, v, torch.tensor(0.5))
    name = "sdpa" if op == "softmax" else "sdpa_4call"
    with pytest.raises(ValueError, match=f"{name}.* cannot limit queries to a window of keys"):
        attend(window=2, backend=name)
    attend(window=4, backend=name)
    for device, expected in (("cpu", "blocked"), ("cuda", "triton")):
        call = Call(op, device, "bfloat16", 128, needs)
        assert choose_backend("auto", call, frozenset({"triton", "cudnn"}))[0] == expected


def test_the_interpreter_lifts_the_limits_of_own_kernels_only(monkeypatch):
    libraries, on_cpu = frozenset({"triton"}), {"device": "cpu", "dtype": "float64", "head_dim": 5}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for op in BACKENDS:
        assert why_not("triton", Call(op, **on_cpu), libraries) is None
        assert "needs the library" in why_not("triton", Call(op, **on_cpu), NOTHING)
    assert "needs a cuda device" in why_not("flex", Call("softmax", **on_cpu), libraries)
    assert choose_backend("auto", Call("softmax", **on_cpu), libraries)[0] == "sdpa"
    monkeypatch.delenv("TRITON_INTERPRET")
    for op in BACKENDS:
        assert "needs a cuda device" in why_not("triton", Call(op, **on_cpu), libraries)


@pytest.mark.parametrize(
    ("device", "libraries", "expected"),
    [("cpu", {"triton"}, "pytorch"), ("cuda", {"triton"}, "triton"), ("cuda", set(), "pytorch")],
)
def test_auto_selects_the_triton_subtraction_on_cuda(device, libraries, expected):
    call = Call("subtraction", device, "bfloat16", 80)
    assert choose_backend("auto", call, frozenset(libraries))[0] == expected


def test_auto_selects_blocked_on_cpu():
    name, reason = choose_backend("auto", ON_CPU, NOTHING)
    assert name == "blocked"
    assert "plain PyTorch" in reason


def test_a_named_backend_is_used():
    assert (
        choose_backend("reference", Call("differential", "cpu", "float64", 5), NOTHING)[0]
        == "reference"
    )


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="choose auto or reference, blocked, triton, flash_2call"):
        choose_backend("fused", ON_CPU, NOTHING)


def test_choice_is_logged_once(caplog):
    installed_backend.cache_clear()
    x, v = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 8)
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            diff_attention(x, x, x, x, v, torch.tensor(0.5))
    (record,) = [r for r in caplog.records if "differential attention" in r.message]
    assert "blocked (row blocks in plain PyTorch" in record.message


def test_table_lists_every_backend_with_a_reason():
    table = backend_table("differential", device="cpu")
    assert [name for name, _, _ in table] == list(DIFFERENTIAL)
    assert all(reason for _, _, reason in table)


def test_table_applies_the_limits_of_the_gpu(monkeypatch):
    monkeypatch.setattr(installed_backends, "chip_of", lambda device: 10)
    monkeypatch.setattr(installed_backends, "importable_libraries", lambda: frozenset(LIBRARIES))
    table = {name: reason for name, _, reason in backend_table("differential", device="cuda")}
    assert table["varlen_fa3"] == "needs compute capability 9.x, got 10.x"
    assert "up to 64 on compute capability 10.x" in table["flash4_2call"]


def test_triton_is_refused_where_it_cannot_run():
    libraries = frozenset({"triton"})
    for device, dtype, head_dim, available, reason in (
        ("cpu", "bfloat16", 128, libraries, "needs a cuda device, got cpu"),
        ("cuda", "bfloat16", 128, NOTHING, "needs the library triton"),
        ("cuda", "float64", 128, libraries, "takes bfloat16, float16, float32, got float64"),
        (
            "cuda",
            "bfloat16",
            72,
            libraries,
            "takes head_dim 64, 80, 96, 112, 128, 192, 256, got 72",
        ),
        ("cuda", "float32", 256, libraries, "takes head_dim .*, 112, 128 in float32, got 256"),
    ):
        with pytest.raises(ValueError, match=f"backend='triton' cannot run: it {reason}"):
            choose_backend("triton", Call("differential", device, dtype, head_dim), available)
    assert choose_backend("triton", ON_CUDA, libraries)[0] == "triton"


def test_auto_never_selects_kernels_untested_on_a_gpu():
    libraries = frozenset({"triton"})
    assert choose_backend("auto", ON_CUDA, libraries)[0] != "triton"


@pytest.mark.parametrize(
    ("libraries", "head_dim", "needs", "expected"),
    [
        ({"triton"}, 128, NOTHING, "sdpa_4call"),
        ({"flash_attn"}, 128, NOTHING, "flash_4call"),
        ({"flash_attn", "flex_head_fa"}, 128, NOTHING, "flash_2call"),
        ({"flash_attn", "flex_head_fa"}, 80, NOTHING, "flash_4call"),
        ({"flash_attn", "flex_head_fa"}, 128, {"documents"}, "flash_2call"),
        ({"flash_attn", "flex_head_fa"}, 128, {"offsets"}, "sdpa_4call"),
        ({"flash_attn", "flex_head_fa"}, 128, {"chunks"}, "sdpa_4call"),
        ({"flash_attn", "flex_head_fa"}, 128, {"chunks", "masked chunks"}, "blocked"),
    ],
)
def test_auto_on_cuda(libraries, head_dim, needs, expected):
    call = Call("differential", "cuda", "bfloat16", head_dim, frozenset(needs))
    assert choose_backend("auto", call, frozenset(libraries))[0] == expected


def test_auto_reports_why_it_skipped_a_backend():
    _, reason = choose_backend("auto", ON_CUDA, frozenset({"flash_attn"}))
    assert (
        "not flash_2call: needs the library flex_head_fa, which is not installed or not usable"
        in reason
    )


def test_a_named_backend_without_a_needed_feature_is_refused():
    call = Call("differential", "cpu", "float32", 64, frozenset({"masked chunks"}))
    with pytest.raises(
        ValueError, match="'sdpa_4call' cannot run: it cannot attend chunk by chunk"
    ):
        choose_backend("sdpa_4call", call, NOTHING)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import no_such_cuda_extension", "No module named 'no_such_cuda_extension'"),
        ("raise ImportError('undefined symbol')", "undefined symbol"),
        ("def flash_attn_func(q, k, v): ...", "flash_attn unknown has no flash_attn_func with"),
    ],
    ids=["does not load", "of another torch", "too old"],
)
def test_an_unusable_library_is_logged_and_skipped(
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


def test_libraries_are_skipped_on_gpus_before_ampere(monkeypatch, caplog):
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
