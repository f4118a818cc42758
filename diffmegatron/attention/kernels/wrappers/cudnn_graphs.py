"""Differential attention by two calls of plain attention, which are compiled graphs of cuDNN.

A graph describes operations that cuDNN compiles together. It is built with nvidia-cudnn-frontend
1.32 or later. torch's own cuDNN attention supports a V of at most 128 columns in the backward pass.

Tensors are contiguous `[b, length, heads, width]`, where b is the batch size. Packed documents have
cuDNN's *ragged* layout: in the graph every document is a batch row, as long as the longest
document. The tensors in memory have no padding. Each document has an offset and a length.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall
from ..first_order import first_order
from ..masks import cached_tensors
from .two_map_calls import two_calls

# torch dtype -> name of the dtype in the frontend.
DATA_TYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
# Maximum number of cached graphs, for forward and backward passes separately.
MOST_GRAPHS = 64
# A ragged tensor must have fewer elements than this, because cuDNN's offsets into it are int32.
_MOST_ELEMENTS = 2**31


class Problem(NamedTuple):
    """Properties of attention with one map that determine the compiled graph.

    `rows` is the number of queries, and `keys` the number of keys. With packed documents
    (`is_packed`), `batch` is the number of documents, and `rows` and `keys` are the length of the
    longest document. These three numbers are rounded up to powers of two. With `causal`, the
    last query has the position of the last key. With `deterministic`, gradients are summed in a
    fixed order.
    """

    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    width: int
    value_width: int
    dtype: torch.dtype
    device: torch.device
    softmax_scale: float
    causal: bool
    is_packed: bool
    deterministic: bool


class Graph(NamedTuple):
    """A compiled graph, its tensors by name (e.g. "q" or "lse"), and its workspace in bytes."""

    graph: Any
    tensors: Mapping[str, Any]
    workspace: int


class Documents(NamedTuple):
    """Lengths and starts of packed documents in tokens, as int32 tensors on the device.

    `lengths` is `[documents, 1, 1, 1]`, and no length exceeds `longest`. `starts` is
    `[documents + 1, 1, 1, 1]`: 0, followed by the cumulative sums of `lengths`.
    """

    lengths: Tensor
    starts: Tensor
    longest: int


@lru_cache
def load_library() -> ModuleType:
    """Import nvidia-cudnn-frontend; raise ValueError if it is too old or finds no cuDNN library."""
    library = import_module("cudnn")
    version = getattr(library, "__version__", "unknown")
    if not hasattr(getattr(library, "pygraph", None), "sdpa_backward"):
        raise ValueError(
            f"nvidia-cudnn-frontend {version} has no pygraph.sdpa_backward; "
            "it must be 1.32 or later"
        )
    try:
        library.backend_version()
    except RuntimeError as error:
        raise ValueError(
            f"nvidia-cudnn-frontend {version} finds no usable libcudnn.so.9: {error}"
        ) from error
    return library


def attend(call: AttentionCall) -> Tensor:
    """Compute differential attention by two calls of plain attention, each with the whole V."""
    bounds = call.mask.cu_seqlens
    if bounds is None:
        return two_calls(partial(_attend_aligned, call), call)
    return two_calls(partial(_attend_documents, call, bounds), call)


def _attend_aligned(call: AttentionCall, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    blind = max(q.shape[1] - k.shape[1], 0) if call.mask.causal else 0
    # The first `blind` query rows see no key. cuDNN does not support them; their output is zero.
    out = _attend(call, None, q[:, blind:], k, v)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, blind, 0)) if blind else out


def _attend_documents(
    call: AttentionCall, bounds: tuple[int, ...], q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    documents = documents_of(bounds, q.shape[0], q.device)
    out = _attend(call, documents, *(x.flatten(0, 1)[None] for x in (q, k, v)))
    return out[0].unflatten(0, q.shape[:2])


@cached_tensors
def documents_of(bounds: tuple[int, ...], batch: int, device: torch.device) -> Documents:
    """Return the documents of all batch rows, concatenated row by row.

    `bounds` are the document boundaries, the same for every batch row. The number of documents and
    `longest` are rounded up to powers of two, so that calls with other documents can use the same
    graph. The additional documents have no tokens.
    """
    row = torch.tensor(bounds)
    lengths = row.diff().repeat(batch)
    filling = _power_of_two(len(lengths)) - len(lengths)
    lengths = torch.nn.functional.pad(lengths, (0, filling))
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return Documents(
        lengths.to(device, torch.int32).view(-1, 1, 1, 1),
        starts.to(device, torch.int32).view(-1, 1, 1, 1),
        _power_of_two(int(lengths.max())),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _attend(
    call: AttentionCall, documents: Documents | None, q: Tensor, k: Tensor, v: Tensor
) -> Tensor:
    """Compute attention with one map; with documents, q, k and v have batch size 1."""
    batch, rows, heads, width = q.shape
    keys = k.shape[1]
    if documents is not None:
        batch, rows, keys = len(documents.lengths), documents.longest, documents.longest
        largest = q.shape[1] * heads * v.shape[3]
        if largest >= _MOST_ELEMENTS:
            raise ValueError(
                f"the output of {q.shape[1]} packed tokens, {heads} heads and width {v.shape[3]} "
                f"has {largest} elements; cuDNN's offsets of documents take less than "
                f"{_MOST_ELEMENTS}"
            )
    problem = Problem(
        batch, heads, k.shape[2], rows, keys, width, v.shape[3], q.dtype, q.device, call.scale,
        call.mask.causal, documents is not None, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    out: Tensor = _Attention.apply(problem, documents, q, k, v)
    return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, problem: Problem, documents: Documents | None, *qkv: Tensor) -> Tensor:
        q, k, v = (x.contiguous() for x in qkv)
        out = q.new_empty(*q.shape[:3], v.shape[3])
        lse = q.new_empty(q.shape[:3].numel(), dtype=torch.float32)
        data = {"q": q, "k": k, "v": v, "o": out, "lse": lse}
        _run(forward_graph(problem), data | _of_documents(problem, documents), problem.device)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem, ctx.documents = problem, documents
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        grads = {f"d{name}": torch.empty_like(x) for name, x in (("q", q), ("k", k), ("v", v))}
        data = {"q": q, "k": k, "v": v, "o": out, "lse": lse, "do": grad.contiguous(), **grads}
        data |= _of_documents(ctx.problem, ctx.documents)
        _run(backward_graph(ctx.problem), data, q.device)
        return None, None, *grads.values()


def _of_documents(problem: Problem, documents: Documents | None) -> dict[str, Tensor]:
    """Return the graph's inputs for documents by name, or {} without documents.

    The inputs are "lengths" in tokens, and "q_starts", "k_starts" etc.: the offsets of the
    documents in q, k etc., in elements.
    """
    if documents is None:
        return {}
    elements_per_token = {
        "q": problem.heads * problem.width,
        "k": problem.kv_heads * problem.width,
        "v": problem.kv_heads * problem.value_width,
        "o": problem.heads * problem.value_width,
        "lse": problem.heads,
    }
    starts = {f"{name}_starts": documents.starts * n for name, n in elements_per_token.items()}
    return {"lengths": documents.lengths, **starts}


def _run(graph: Graph, data: dict[str, Tensor], device: torch.device) -> None:
    workspace = torch.empty(graph.workspace, dtype=torch.uint8, device=device)
    given = {graph.tensors[name]: x for name, x in data.items()}
    graph.graph.execute(given, workspace, handle=_handle_on_stream(device))


def _handle_on_stream(device: torch.device) -> Any:
    handle, stream = _handle(device), torch.cuda.current_stream(device)
    load_library().set_stream(handle=handle, stream=stream.cuda_stream)
    return handle


@lru_cache
def _handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return load_library().create_handle()


@lru_cache(maxsize=MOST_GRAPHS)
def forward_graph(problem: Problem) -> Graph:
    """Return the compiled forward graph, which computes the output and the log-sum-exps."""
    builder = _Builder(problem)
    inputs = {name: builder.tensor(name) for name in ("q", "k", "v")}
    out, lse = builder.graph.sdpa(
        **inputs, name="attention", generate_stats=True, **builder.options()
    )
    builder.output("o", out)
    builder.output("lse", lse)
    return builder.compiled()


@lru_cache(maxsize=MOST_GRAPHS)
def backward_graph(problem: Problem) -> Graph:
    """Return the compiled backward graph, which computes the gradients of q, k and v."""
    builder = _Builder(problem)
    inputs = {name: builder.tensor(name) for name in ("q", "k", "v", "o")}
    grads = builder.graph.sdpa_backward(
        **inputs,
        dO=builder.tensor("do"),
        stats=builder.tensor("lse"),
        name="attention_backward",
        use_deterministic_algorithm=problem.deterministic,
        **builder.options(),
    )
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        builder.output(name, grad)
    return builder.compiled()


class _Builder:
    """A cuDNN graph under construction."""

    def __init__(self, problem: Problem) -> None:
        self.library = load_library()
        types = self.library.data_type
        self.problem = problem
        self.dtype = getattr(types, DATA_TYPES[problem.dtype])
        self.tensors: dict[str, Any] = {}
        self.graph = self.library.pygraph(
            io_data_type=self.dtype,
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=_handle_on_stream(problem.device),
        )

    def tensor(self, name: str) -> Any:
        """Add the input `name` to the graph, and return its tensor in the graph."""
        dims, strides, dtype = self._layout(name)
        tensor = self.graph.tensor(name=name, dim=dims, stride=strides, data_type=dtype)
        return self._placed(name, tensor)

    def output(self, name: str, tensor: Any) -> None:
        """Declare `tensor`, the result of an operation, as the output `name` of the graph."""
        dims, strides, dtype = self._layout(name)
        tensor.set_output(True).set_dim(dims).set_stride(strides).set_data_type(dtype)
        self._placed(name, tensor)

    def options(self) -> dict[str, Any]:
        """Return the options that `sdpa` and `sdpa_backward` share: scale, mask and documents."""
        problem = self.problem
        is_square = problem.rows == problem.keys
        options: dict[str, Any] = {
            "attn_scale": problem.softmax_scale,
            "use_causal_mask": problem.causal and is_square,
            "use_causal_mask_bottom_right": problem.causal and not is_square,
        }
        if problem.is_packed:
            lengths = self._table("lengths", problem.batch)
            options |= {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths}
        return options

    def compiled(self) -> Graph:
        """Compile the graph with the first usable plan in the order of cuDNN's heuristics."""
        library, graph = self.library, self.graph
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except (library.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
            of, reason = self.problem, str(error).splitlines()[0]
            raise ValueError(
                f"cuDNN {library.backend_version()} does not support head widths {of.width} and "
                f"{of.value_width} in {of.dtype} with {of.rows} queries and {of.keys} keys: "
                f"{reason}; choose another backend"
            ) from error
        return Graph(graph, self.tensors, graph.get_workspace_size())

    def _layout(self, name: str) -> tuple[list[int], list[int], Any]:
        """Return dimensions `[b, heads, length, width]`, strides and dtype of a tensor, e.g. "dq".

        The strides are as in a contiguous `[b, length, heads, width]`. "lse" has width 1.
        Without packed documents, "lse" has the strides of a contiguous `[b, heads, length, 1]`.
        """
        of = self.problem
        if name == "lse":
            dims = [of.batch, of.heads, of.rows, 1]
            strides = [of.heads * of.rows, of.rows, 1, 1]
            if of.is_packed:
                strides = [of.heads * of.rows, 1, of.heads, 1]
            return dims, strides, self.library.data_type.FLOAT
        kind = name.removeprefix("d")
        is_key = kind in "kv"
        heads = of.kv_heads if is_key else of.heads
        length = of.keys if is_key else of.rows
        width = of.value_width if kind in "vo" else of.width
        strides = [length * heads * width, width, heads * width, 1]
        return [of.batch, heads, length, width], strides, self.dtype

    def _placed(self, name: str, tensor: Any) -> Any:
        self.tensors[name] = tensor
        if self.problem.is_packed:
            kind = name if name == "lse" else name.removeprefix("d")
            tensor.set_ragged_offset(self._table(f"{kind}_starts", self.problem.batch + 1))
        return tensor

    def _table(self, name: str, length: int) -> Any:
        """Return the graph's int32 input `name` `[length, 1, 1, 1]`; the first call adds it."""
        if name not in self.tensors:
            self.tensors[name] = self.graph.tensor(
                name=name,
                dim=[length, 1, 1, 1],
                stride=[1, 1, 1, 1],
                data_type=self.library.data_type.INT32,
            )
        return self.tensors[name]
