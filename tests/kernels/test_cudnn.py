"""Tests of the backend `cudnn_2call` with a stand-in for the package nvidia-cudnn-frontend.

cuDNN needs a GPU, so the stand-in does not use cuDNN. It has the functions that the backend calls,
with the names and arguments of frontend 1.32. It computes attention itself, from the dimensions,
strides, ragged offsets and lengths that a graph declares. The tests compare the result with the
backend `reference`. Only tests/gpu can test cuDNN's results and the inputs that cuDNN supports.
"""

import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch

from diffmegatron.attention.kernels.call import AttentionCall
from diffmegatron.attention.kernels.installed_backends import importable_libraries
from diffmegatron.attention.kernels.maps import QKV
from diffmegatron.attention.kernels.pytorch import reference
from diffmegatron.attention.kernels.wrappers import cudnn_graphs
from tests.kernels.loops import make_inputs, relative_error

CASES = {
    "causal": ({"rows": 9}, {}),
    "full": ({"rows": 9}, {"causal": False}),
    "gqa": ({"batch": 2, "rows": 7, "heads": 4, "kv_heads": 2}, {}),
    "grouped": ({"rows": 7, "heads": 6, "noise_heads": 2, "kv_heads": 2}, {}),
    "s < t": ({"batch": 2, "rows": 4, "keys": 9}, {}),
    "s > t": ({"batch": 2, "rows": 9, "keys": 4}, {}),
    "s > t, full": ({"rows": 9, "keys": 4}, {"causal": False}),
    "documents": (
        {"batch": 2, "rows": 9, "heads": 4, "kv_heads": 2},
        {"cu_seqlens": torch.tensor([0, 1, 5, 9])},
    ),
    "full documents": (
        {"batch": 3, "rows": 9},
        {"causal": False, "cu_seqlens": torch.tensor([0, 6, 9])},
    ),
}
# The inputs are float64, but the backend stores log-sum-exps in float32.
TOLERANCE = 1e-5


class NotSupportedError(RuntimeError):
    """Stand-in for the error that the frontend raises for an unsupported graph."""


class GraphTensor:
    """Stand-in for the frontend's description of a tensor in a graph."""

    def __init__(self, dim=None, stride=None, data_type=None, name=""):
        self.dim, self.stride, self.data_type, self.name = dim, stride, data_type, name
        self.ragged_offset = None
        self.is_output = False

    def set_output(self, is_output):
        self.is_output = is_output
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, data_type):
        self.data_type = data_type
        return self

    def set_ragged_offset(self, offset):
        self.ragged_offset = offset
        return self


class Graph:
    """Stand-in for the frontend's graph that checks the order of calls and computes in float64."""

    built = 0

    def __init__(self, *, io_data_type, intermediate_data_type, compute_data_type, handle):
        assert (intermediate_data_type, compute_data_type) == ("FLOAT", "FLOAT")
        self.handle = handle
        self.steps = []

    def tensor(self, *, name, dim, stride, data_type):
        return GraphTensor(dim, stride, data_type, name)

    def sdpa(self, q, k, v, *, name, generate_stats, **options):
        assert generate_stats
        self.inputs = {"q": q, "k": k, "v": v}
        self.outputs = {"o": GraphTensor(), "stats": GraphTensor()}
        self.options = options
        return tuple(self.outputs.values())

    def sdpa_backward(
        self, q, k, v, o, dO, stats, *, name, use_deterministic_algorithm, **options
    ):  # fmt: skip
        self.inputs = {"q": q, "k": k, "v": v, "o": o, "dO": dO, "stats": stats}
        self.outputs = {name: GraphTensor() for name in ("dQ", "dK", "dV")}
        self.options = options
        self.deterministic = use_deterministic_algorithm
        return tuple(self.outputs.values())

    def step(self, name):
        self.steps.append(name)

    def validate(self):
        self.step("validate")

    def build_operation_graph(self):
        self.step("build_operation_graph")

    def create_execution_plans(self, modes):
        assert modes == ["A", "FALLBACK"]
        self.step("create_execution_plans")

    def check_support(self):
        if self.inputs["v"].dim[3] > 256:
            raise NotSupportedError("hidden_dim should be at most 256\nand more")
        self.step("check_support")

    def build_plans(self):
        assert self.steps == [
            "validate",
            "build_operation_graph",
            "create_execution_plans",
            "check_support",
        ]
        Graph.built += 1

    def get_workspace_size(self):
        return 24

    def execute(self, data, workspace, *, handle):
        assert handle == self.handle
        assert (workspace.dtype, workspace.numel()) == (torch.uint8, 24)
        assert all(x.is_output for x in self.outputs.values())
        lengths = [self.options.get(f"seq_len_{side}") for side in ("q", "kv")]
        assert (lengths[0] is not None) == self.options.get("use_padding_mask", False)
        for row in range(self.inputs["q"].dim[0]):
            view = partial(self.view, data, lengths, row)
            inputs = {name: view(name, tensor).double() for name, tensor in self.inputs.items()}
            for name, result in self.compute(**inputs).items():
                view(name, self.outputs[name]).copy_(result)

    def view(self, data, lengths, row, name, tensor):
        """Return one sequence, `[heads, length, width]`, as a view at its declared address."""
        start = row * tensor.stride[0]
        length = tensor.dim[2]
        is_key = name.lower().lstrip("d") in ("k", "v")
        if tensor.ragged_offset is not None:
            assert tensor.ragged_offset.dim == [tensor.dim[0] + 1, 1, 1, 1]
            start = int(data[tensor.ragged_offset].flatten()[row])
            length = int(data[lengths[is_key]].flatten()[row])
            assert length <= tensor.dim[2]
        memory = data[tensor]
        assert memory.is_contiguous()
        shape = (tensor.dim[1], length, tensor.dim[3])
        return memory.flatten().as_strided(shape, tensor.stride[1:], start)

    def maps(self, q, k):
        """Return the scores, -inf where masked, and the keys repeated for every query head."""
        k = k.repeat_interleave(q.shape[0] // k.shape[0], 0)
        scores = q @ k.mT * self.options["attn_scale"]
        rows, keys = scores.shape[1:]
        shift = keys - rows if self.options["use_causal_mask_bottom_right"] else 0
        assert shift >= 0
        if self.options["use_causal_mask"] or self.options["use_causal_mask_bottom_right"]:
            hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 + shift)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores, k

    def compute(self, q, k, v, o=None, dO=None, stats=None):
        scores, keys = self.maps(q, k)
        values = v.repeat_interleave(len(q) // len(v), 0)
        if o is None:
            return {"o": scores.softmax(-1) @ values, "stats": scores.logsumexp(-1, keepdim=True)}
        weights = (scores - stats).exp()
        dscores = weights * (dO @ values.mT - (o * dO).sum(-1, keepdim=True))
        dscores *= self.options["attn_scale"]

        def per_kv_head(grad):
            return grad.unflatten(0, (len(k), -1)).sum(1)

        return {
            "dQ": dscores @ keys,
            "dK": per_kv_head(dscores.mT @ q),
            "dV": per_kv_head(weights.mT @ dO),
        }


@pytest.fixture
def stand_in(monkeypatch):
    # This call caches the list of installed libraries before the stand-in is installed, so that the
    # list does not contain the stand-in.
    importable_libraries()
    library = ModuleType("cudnn")
    library.__version__ = "1.0"
    library.pygraph = Graph
    library.cudnnGraphNotSupportedError = NotSupportedError
    library.heur_mode = SimpleNamespace(A="A", FALLBACK="FALLBACK")
    library.data_type = SimpleNamespace(FLOAT="FLOAT", INT32="INT32", DOUBLE="DOUBLE")
    library.backend_version = lambda: 91900
    monkeypatch.setitem(sys.modules, "cudnn", library)
    monkeypatch.setattr(cudnn_graphs, "_handle_on_stream", lambda device: f"handle of {device}")
    monkeypatch.setitem(cudnn_graphs.DATA_TYPES, torch.float64, "DOUBLE")
    monkeypatch.setattr(Graph, "built", 0)
    kept = (cudnn_graphs.load_library, cudnn_graphs.forward_graph, cudnn_graphs.backward_graph)
    for function in kept:
        function.cache_clear()
    yield library
    for function in kept:
        function.cache_clear()


def call_of(inputs, **options):
    return AttentionCall.checked(QKV.of(*inputs[:5]), inputs[5], softmax_scale=0.4, **options)


@pytest.mark.parametrize(("shape", "options"), CASES.values(), ids=CASES)
def test_values_and_gradients(stand_in, shape, options):
    inputs = make_inputs(**shape)
    call = call_of(inputs, **options)
    out, expected = cudnn_graphs.attend(call), reference.attend(call)
    assert relative_error(out, expected) < TOLERANCE
    grads = torch.autograd.grad(out.square().sum(), inputs)
    wanted = torch.autograd.grad(expected.square().sum(), inputs)
    for actual, grad in zip(grads, wanted, strict=True):
        assert relative_error(actual, grad) < TOLERANCE


def test_graphs_are_reused_for_equal_shapes_and_similar_documents(stand_in):
    inputs = make_inputs(rows=9)

    def attend(bounds):
        bounds = None if bounds is None else torch.tensor(bounds)
        cudnn_graphs.attend(call_of(inputs, cu_seqlens=bounds)).sum().backward()

    attend(None)
    attend(None)
    assert Graph.built == 2
    attend([0, 1, 4, 9])
    attend([0, 2, 3, 4, 9])
    assert Graph.built == 4
    attend([0, 4, 9])
    assert Graph.built == 6


def test_deterministic_mode_reaches_the_backward_graph(stand_in):
    inputs = make_inputs(rows=9)
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            cudnn_graphs.attend(call_of(inputs))
            problem = cudnn_graphs.Problem(
                1, 2, 2, 9, 9, inputs[0].shape[3], inputs[4].shape[3], torch.float64,
                torch.device("cpu"), 0.4, True, False, torch.are_deterministic_algorithms_enabled(),
            )  # fmt: skip
            assert cudnn_graphs.backward_graph(problem).graph.deterministic == wanted
        finally:
            torch.use_deterministic_algorithms(False)


def test_an_unsupported_shape_is_refused_with_cudnns_reason(stand_in):
    inputs = make_inputs(rows=3, width=136)
    message = (
        r"^cuDNN 91900 does not support head widths 136 and 272 in torch\.float64 with 3 queries "
        r"and 3 keys: hidden_dim should be at most 256; choose another backend$"
    )
    with pytest.raises(ValueError, match=message):
        cudnn_graphs.attend(call_of(inputs))


def test_documents_past_32_bits_are_refused(stand_in, monkeypatch):
    monkeypatch.setattr(cudnn_graphs, "_MOST_ELEMENTS", 100)
    inputs = make_inputs(rows=9)
    call = call_of(inputs, cu_seqlens=torch.tensor([0, 4, 9]))
    with pytest.raises(ValueError, match=r"9 packed tokens, .* cuDNN's offsets .* less than 100"):
        cudnn_graphs.attend(call)


def test_a_frontend_without_attention_or_without_cudnn_is_refused(stand_in):
    def backend_version():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    cudnn_graphs.load_library.cache_clear()
    stand_in.backend_version = backend_version
    with pytest.raises(ValueError, match=r"frontend 1\.0 finds no usable libcudnn\.so\.9: Unable"):
        cudnn_graphs.load_library()
    stand_in.pygraph = object
    with pytest.raises(ValueError, match=r"frontend 1\.0 has no pygraph\.sdpa_backward; it must"):
        cudnn_graphs.load_library()
