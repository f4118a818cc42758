"""Self-attention of every kind, compared with its equations head by head in float64.

The expected values use only the order of rows in the projections and the papers' equations, not the
package's code.
"""

import math
from inspect import stack

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import build_module

from diffmegatron.attention.context_parallel import whole_sequence
from diffmegatron.attention.context_parallel.whole_sequence import WholeSequence
from diffmegatron.attention.kernels.pytorch import reference
from diffmegatron.config.parallel_config import ParallelConfig
from diffmegatron.model.build import transformer_config
from diffmegatron.model.layers.layer_specs import layer_spec
from diffmegatron.parallel.parallel_state import process_groups

LENGTH, BATCH, HIDDEN, D, LAYER, STEP = 7, 2, 24, 4, 2, 3
LAMBDA_INIT = 0.8 - 0.6 * math.exp(-0.3)

SECTIONS = {
    "softmax": {"kind": "softmax", "num_heads": 6, "num_kv_heads": 2},
    "softmax, 9 heads": {"kind": "softmax", "num_heads": 9, "num_kv_heads": 3},
    "softmax, qk_norm": {"kind": "softmax", "num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
    "softmax, normed": {"kind": "softmax", "num_heads": 4, "headwise_norm": True},
    "diff_v1": {"kind": "diff_v1", "num_heads": 4},
    "diff_v1, grouped queries": {"kind": "diff_v1", "num_heads": 6, "num_kv_heads": 2},
    "diff_v1, no norm": {"kind": "diff_v1", "num_heads": 2, "headwise_norm": False},
    "diff_v1, qk_norm": {"kind": "diff_v1", "num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
    "diff_v2": {"kind": "diff_v2", "num_heads": 4},
    "diff_v2, qk_norm": {"kind": "diff_v2", "num_heads": 4, "num_kv_heads": 2, "qk_norm": True},
    "diff_v2, grouped queries": {"kind": "diff_v2", "num_heads": 6, "num_kv_heads": 2},
    "diff_v2, 3 per noise head": {
        "kind": "diff_v2",
        "num_heads": 6,
        "num_kv_heads": 2,
        "signal_per_noise": 3,
    },
    "grouped": {"kind": "grouped", "num_heads": 4, "signal_per_noise": 2},
    "grouped, qk_norm": {
        "kind": "grouped",
        "num_heads": 4,
        "signal_per_noise": 2,
        "qk_norm": True,
    },
    "grouped, grouped queries": {
        "kind": "grouped",
        "num_heads": 12,
        "num_kv_heads": 2,
        "signal_per_noise": 3,
    },
    "softmax, gated": {
        "kind": "softmax",
        "num_heads": 6,
        "num_kv_heads": 2,
        "qk_norm": True,
        "output_gate": "elementwise",
    },
    "softmax, headwise gate": {
        "kind": "softmax",
        "num_heads": 4,
        "headwise_norm": True,
        "output_gate": "headwise",
    },
    "diff_v1, gated": {
        "kind": "diff_v1",
        "num_heads": 6,
        "num_kv_heads": 2,
        "output_gate": "elementwise",
    },
    "diff_v1, headwise gate": {
        "kind": "diff_v1",
        "num_heads": 4,
        "num_kv_heads": 2,
        "output_gate": "headwise",
    },
    "diff_v2, gated": {
        "kind": "diff_v2",
        "num_heads": 6,
        "num_kv_heads": 2,
        "signal_per_noise": 3,
        "output_gate": "elementwise",
    },
    "diff_v2, headwise gate": {
        "kind": "diff_v2",
        "num_heads": 6,
        "num_kv_heads": 2,
        "output_gate": "headwise",
    },
    "grouped, gated": {
        "kind": "grouped",
        "num_heads": 12,
        "num_kv_heads": 2,
        "signal_per_noise": 3,
        "qk_norm": True,
        "output_gate": "elementwise",
    },
    "grouped, headwise gate": {
        "kind": "grouped",
        "num_heads": 4,
        "signal_per_noise": 2,
        "headwise_norm": False,
        "output_gate": "headwise",
    },
    # In layer 2, head 1 uses the first key-value head, and heads 3 and 5 use the second.
    "dex": {
        "kind": "dex",
        "num_heads": 6,
        "num_kv_heads": 2,
        "selected_heads": [[0, 3, 4], [1, 3, 5]],
        "annealing_steps": 8,
    },
    "dex, normed, after annealing": {
        "kind": "dex",
        "num_heads": 4,
        "headwise_norm": True,
        "selected_heads": [[], [2, 3]],
        "annealing_steps": 2,
    },
}
SECTIONS |= {
    f"{name}, window": SECTIONS[name] | {"window": 3}
    for name in ("softmax", "diff_v1", "diff_v2", "grouped", "dex")
}


@pytest.fixture(scope="module")
def single_process():
    with process_groups(ParallelConfig(), seed=1):
        yield


@pytest.fixture
def build(single_process, tiny_recipe):
    """Return a function that builds self-attention of layer ``LAYER`` with random weights."""

    def make(section: dict, dtype: torch.dtype = torch.float64, backend: str = "reference"):
        keys = {"num_kv_heads": 0} | section | {"head_dim": D}
        given = ", ".join(f"{key}: {value}" for key, value in keys.items())
        recipe = tiny_recipe(f"model.hidden_size={HIDDEN}", f"model.attention={{{given}}}")
        spec = layer_spec(recipe.model.attention.kinds[0], "local", backend)
        module = build_module(
            spec.submodules.self_attention, config=transformer_config(recipe), layer_number=LAYER
        )
        generator = torch.Generator().manual_seed(4)
        for parameter in module.parameters():
            values = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = values.to(dtype)
        module.step = STEP
        return module

    return make


def rotary_angles() -> torch.Tensor:
    """Return rotary angles [s, 1, 1, d] in float64; both halves of d have the same angles."""
    frequencies = 10_000.0 ** -(torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles = torch.arange(LENGTH, dtype=torch.float64)[:, None] * frequencies
    return torch.cat([angles, angles], -1)[:, None, None]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotate each row of a head [s, d] by its position; channels i and i + d / 2 form a pair."""
    angles = rotary_angles()[:, 0, 0]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def softmax_map(
    q: torch.Tensor, k: torch.Tensor, ends: list[int], window: int = LENGTH
) -> torch.Tensor:
    """Return the attention map [s, s]: a causal softmax within each document and window.

    Args:
        q: queries [s, d] of a head.
        k: keys [s, d] of the head.
        ends: 0, and the end of every document except the last.
        window: number of positions that a position sees, itself included.
    """
    rows = []
    for position in range(LENGTH):
        first = max(position + 1 - window, *(end for end in ends if end <= position))
        scores = torch.stack(
            [q[position] @ k[other] / math.sqrt(D) for other in range(first, position + 1)]
        )
        row = q.new_zeros(LENGTH)
        row[first : position + 1] = torch.exp(scores) / torch.exp(scores).sum()
        rows.append(row)
    return torch.stack(rows)


def normed(head: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * weight * head / torch.sqrt((head**2).mean(-1, keepdim=True) + 1e-5)


def extended(section: dict, weights: dict, number: int, head: torch.Tensor) -> torch.Tensor:
    """Return ``head`` [s, d], and subtract DEX's term if the layer selects head ``number``."""
    if section["kind"] != "dex" or number not in section["selected_heads"][LAYER - 1]:
        return head
    passed = STEP / section["annealing_steps"]
    a = min(1.0, passed)
    lambda_ = (1 - a) * passed * LAMBDA_INIT + a * weights["lambda_learn"]
    return head - lambda_ * (head @ weights["dex_projection"])


def expected_row(section: dict, weights: dict, hidden: torch.Tensor, ends: list[int]):
    """Return the expected output [s, hidden] of self-attention for one row of the batch.

    The fused projection has these rows for each key-value head:

    - In softmax attention and DEX: the queries, a key and a value.
    - In V2: the queries of each group, a key and a value. The queries of a group are its signal
      queries, followed by its noise query.
    - In V1 and "grouped": the signal queries, their key, the first half of the value, the noise
      queries, their key, and the second half of the value.

    With an elementwise gate, every run of queries is followed by an equal number of the gate's
    logits, which are in the order of the output channels.
    """
    kind, h = section["kind"], section["num_heads"]
    window = section.get("window", LENGTH)
    r = section.get("signal_per_noise", 1)
    kv_heads = section.get("num_kv_heads", h // r)
    mixed = iter((hidden @ weights["linear_qkv.weight"].T).split(D, dim=-1))

    def rotated_heads(count, norm):
        each = [next(mixed) for _ in range(count)]
        if section.get("qk_norm"):
            each = [normed(head, weights[norm], 1.0) for head in each]
        return [rotated(head) for head in each]

    logits, is_elementwise = [], section.get("output_gate") == "elementwise"

    def queries(count):
        found = rotated_heads(count, "q_norm")
        logits.extend(next(mixed) for _ in range(is_elementwise * h // kv_heads))
        return found

    def key():
        return rotated_heads(1, "k_norm")[0]

    heads = []
    for _ in range(kv_heads):
        if kind in ("softmax", "diff_v2", "dex"):
            groups = h // kv_heads // r
            noise = groups if kind == "diff_v2" else 0
            q = queries(groups * r + noise)
            k, v = key(), next(mixed)
            outs = [softmax_map(each, k, ends, window) @ v for each in q]
            if kind in ("softmax", "dex"):
                if section.get("headwise_norm"):
                    outs = [normed(out, weights["head_norm"], 1.0) for out in outs]
                for out in outs:
                    heads.append(extended(section, weights, len(heads), out))
                continue
            for group in range(groups):
                *signals, noise_out = outs[group * (r + 1) : (group + 1) * (r + 1)]
                for signal in signals:
                    row = weights["lambda_proj"][len(heads)]
                    heads.append(signal - torch.sigmoid(hidden @ row)[:, None] * noise_out)
            continue
        signal = h // kv_heads
        q1, k1, va = queries(signal), key(), next(mixed)
        q2, k2, vb = queries(signal // r), key(), next(mixed)
        value = torch.cat([va, vb], -1)
        lambda_ = (
            torch.exp(weights["lambda_q1"] @ weights["lambda_k1"])
            - torch.exp(weights["lambda_q2"] @ weights["lambda_k2"])
            + LAMBDA_INIT
        )
        for number in range(signal):
            maps = softmax_map(q1[number], k1, ends, window)
            maps = maps - lambda_ * softmax_map(q2[number // r], k2, ends, window)
            head = maps @ value
            if section.get("headwise_norm", True):
                head = normed(head, weights["head_norm"], 1 - LAMBDA_INIT)
            heads.append(head)
    assert next(mixed, None) is None
    if section.get("output_gate") == "headwise":
        rows = zip(heads, weights["output_gate"], strict=True)
        heads = [head * torch.sigmoid(hidden @ row)[:, None] for head, row in rows]
    output = torch.cat(heads, -1)
    if is_elementwise:
        output = output * torch.sigmoid(torch.cat(logits, -1))
    return output @ weights["linear_proj.weight"].T


def inputs(dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    grad = torch.randn(LENGTH, BATCH, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), grad.to(dtype)


def with_gradients(out, hidden, grad, parameters):
    gradients = torch.autograd.grad(out, [hidden, *parameters.values()], grad)
    return [out.detach(), *gradients]


def expected(section, module, ends):
    weights = {
        name: value.detach().double().requires_grad_() for name, value in module.named_parameters()
    }
    hidden, grad = inputs()
    out = torch.stack(
        [expected_row(section, weights, hidden[:, row], ends[row]) for row in range(BATCH)], 1
    )
    return with_gradients(out, hidden, grad, weights)


@pytest.mark.parametrize("name", SECTIONS)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
def test_layer_outputs_and_gradients_equal_the_equations(build, name, packed):
    section = SECTIONS[name]
    module = build(section)
    hidden, grad = inputs()
    documents, ends = None, [[0]] * BATCH
    if packed:
        row_ends = torch.tensor([0, 3, LENGTH, LENGTH + 5, 2 * LENGTH])
        documents = PackedSeqParams(qkv_format="sbhd", cu_seqlens_q=row_ends)
        ends = [[0, 3], [0, 5]]
    out, bias = module(hidden, None, rotary_pos_emb=rotary_angles(), packed_seq_params=documents)
    assert bias is None
    found = with_gradients(out, hidden, grad, dict(module.named_parameters()))
    for mine, theirs in zip(found, expected(section, module, ends), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["softmax", "diff_v1", "diff_v2", "grouped", "dex"])
def test_float32_equals_float64_to_rounding_error(build, name):
    section = SECTIONS[name]
    module = build(section, torch.float32, "auto")
    hidden, grad = inputs(torch.float32)
    out, _ = module(hidden, None, rotary_pos_emb=rotary_angles().float())
    found = with_gradients(out, hidden, grad, dict(module.named_parameters()))
    for mine, theirs in zip(found, expected(section, module, [[0]] * BATCH), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-5)


def test_placing_all_signal_heads_first_changes_v2(build):
    """Check that V2's output depends on the order of the query heads.

    In V2 each noise head follows its signal heads. If all signal heads preceded all noise heads,
    some heads would use another key-value head.
    """
    section = SECTIONS["diff_v2, grouped queries"]
    module = build(section)
    hidden, _ = inputs()
    out, _ = module(hidden, None, rotary_pos_emb=rotary_angles())
    # There are 12 query heads. Move the 6 signal heads before the 6 noise heads. The first 6 query
    # heads use the first key-value head, so all noise heads then use the second one.
    rows = module.linear_qkv.weight.data.unflatten(0, (2, 8, D))
    queries = rows[:, :6].flatten(0, 1)
    as_halves = torch.cat([queries[0::2], queries[1::2]])
    rows[:, :6] = as_halves.unflatten(0, (2, 6))
    halves, _ = module(hidden, None, rotary_pos_emb=rotary_angles())
    assert (out - halves).abs().max() > 1e-2 * out.abs().max()


@pytest.mark.parametrize("layer", [1, 3])
def test_lambda_init_depends_on_the_layer_number_counted_from_one(build, layer):
    module = build(SECTIONS["diff_v1"])
    module.layer_number = layer
    for name in ("lambda_q1", "lambda_q2"):
        getattr(module, name).data.zero_()
    found = module.kind.current_lambda(module).item()
    assert found == pytest.approx(0.8 - 0.6 * math.exp(-0.3 * (layer - 1)))


def test_own_parameters_keep_their_dtype_in_a_bf16_model(build):
    module = build(SECTIONS["diff_v1"], torch.float32, "auto")
    before = {name: value.clone() for name, value in module.named_parameters()}
    module.bfloat16()
    hidden, _ = inputs(torch.bfloat16)
    out, _ = module(hidden, None, rotary_pos_emb=rotary_angles().float())
    assert out.dtype == torch.bfloat16
    for name, value in module.named_parameters():
        is_projection = name.startswith("linear")
        assert value.dtype == (torch.bfloat16 if is_projection else torch.float32)
        assert is_projection or torch.equal(value, before[name])


def calls_above_the_kernel(module, monkeypatch) -> list[str]:
    """Return the functions that a forward pass calls from the layer to the kernel.

    The first function is the layer's ``forward``, and the last is the caller of the kernel. Each is
    returned as "FILE:FUNCTION".
    """
    kernel, found = reference.attend, []

    def look(call):
        names = [f"{frame.filename.rpartition('/')[2]}:{frame.function}" for frame in stack()[1:]]
        found.extend(names[names.index("self_attention.py:forward") :: -1])
        return kernel(call)

    monkeypatch.setattr(reference, "attend", look)
    module(inputs()[0][:6], None, rotary_pos_emb=rotary_angles()[:6])
    return found


def test_three_calls_lead_to_the_kernel(build, monkeypatch):
    module = build(SECTIONS["diff_v1"])
    assert calls_above_the_kernel(module, monkeypatch) == [
        "self_attention.py:forward",
        "two_maps.py:forward",
        "api.py:diff_attention",
    ]


def test_context_parallelism_adds_one_call_before_the_kernel(build, monkeypatch):
    module = build(SECTIONS["diff_v1"])
    module.whole_sequence = WholeSequence(TwoRanks(), "all_gather", "differential", "reference")
    monkeypatch.setattr(
        whole_sequence,
        "gather_from_sequence_parallel_region",
        lambda local, **_: torch.cat([local, local]),
    )
    assert calls_above_the_kernel(module, monkeypatch)[:4] == [
        "self_attention.py:forward",
        "two_maps.py:forward",
        "whole_sequence.py:gathered_attention",
        "api.py:diff_attention",
    ]


class TwoRanks:
    """A process group of two ranks, in which this process is rank 0."""

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0
