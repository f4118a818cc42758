"""Count the operations of a layer and of the loss, and the bytes that they read and write.

A layer of the recipe's shape runs forward and backward on torch's meta device, which computes
nothing. This is done for several kinds of attention and for a Transformer of equal size. Every aten
operation that would launch a kernel on a GPU counts, so views do not. Its bytes are the sizes of
its input and output tensors. The attention kernels are not counted. RMSNorm, SwiGLU, the
subtraction of DIFF V2's noise heads and the cross-entropy are each one kernel on a GPU, and count
as one operation each.

Writes two files to docs/results/: NAME.json with every operation, and NAME.md, a table with sums by
part of the layer. The last column of the table is the Transformer with Megatron-core's own rotary
embedding and loss.

    python -m tools.benchmarks layer_operations
    python -m tools.benchmarks layer_operations --attention diff_v1 --attention grouped
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.transformer import mlp
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from diffmegatron.attention.context_parallel import whole_sequence
from diffmegatron.config.load import load_recipe
from diffmegatron.config.schema import Recipe
from diffmegatron.model import build, cross_entropy_kernel, language_model_loss
from diffmegatron.model.layers import self_attention
from diffmegatron.parallel.parallel_state import process_groups
from tools.benchmarks.json_report import write_json_report
from tools.paths import RESULTS

BASELINE = "Transformer"
MEGATRON = "Transformer, Megatron-core's own"
ALL, LOSS = "layer", "loss of the network"
Count = Callable[[Sequence[Tensor]], None]
# The part of a layer to which the operations of each module belong, as the report names it.
PARTS = {
    "input_layernorm": "norms",
    "pre_mlp_layernorm": "norms",
    "self_attention.linear_qkv": "projections",
    "self_attention.linear_proj": "projections",
    "mlp.linear_fc1": "projections",
    "mlp.linear_fc2": "projections",
    "self_attention": "between the attention's projections",
    "mlp": "between the MLP's projections",
    "": "residuals",
}
# Operations other than views that launch no kernel.
NO_KERNEL = {
    *("aten::empty", "aten::empty_like", "aten::new_empty"),
    *("aten::detach", "aten::_unsafe_view", "prims::promote_types", "aten::promote_types"),
}


def main(arguments: argparse.Namespace) -> None:
    """Count, print and write the report."""
    kinds = arguments.attention or ["diff_v1", "diff_v2", "grouped"]
    recipes = {
        kind: load_recipe(arguments.recipe, [*arguments.overrides, f"model.attention.kind={kind}"])
        for kind in kinds
    }
    recipes[BASELINE] = load_recipe(arguments.recipe, [*arguments.overrides, "model.baseline=true"])
    counted = {name: count_layer(recipe) for name, recipe in recipes.items()}
    counted[MEGATRON] = count_layer(recipes[BASELINE], _megatrons())
    shape = recipes[BASELINE]
    report = {
        "command": "python -m tools.benchmarks layer_operations",
        "torch": torch.__version__,
        "hidden_size": shape.model.hidden_size,
        "tokens": shape.training.micro_batch_size * shape.training.seq_length,
        "precision": shape.training.precision,
        "operations": {name: work.rows() for name, work in counted.items()},
    }
    table = markdown(report)
    write_json_report(RESULTS / f"{arguments.name}.json", report)
    (RESULTS / f"{arguments.name}.md").write_text(table)
    print(table)


class Work(TorchDispatchMode):
    """Dispatch mode that counts operations and bytes by pass, part of the layer and operation.

    An operation of the backward pass belongs to the part whose forward pass created its autograd
    node. Autograd numbers the nodes in the order of the forward pass. This class stores the next
    number whenever a part begins, and thus finds the part of a node by its number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        self._parts: list[tuple[int, str | None]] = [(0, None)]

    def enter(self, part: str | None) -> None:
        """Begin a part: the following operations count for it; with None, they do not count."""
        self._parts.append((torch._C._autograd._get_sequence_nr(), part))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.name().partition(".")[0]
        if not function.is_view and name not in NO_KERNEL:
            leaves = tree_leaves((args, kwargs, result))
            self.count(name, [x for x in leaves if isinstance(x, Tensor)])
        return result

    def count(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Count one operation, and the bytes of its tensors; the bytes of each tensor count once.

        Args:
            name: name of the operation.
            tensors: inputs and outputs, in which a tensor may occur several times.
        """
        node = torch._C._current_autograd_node()
        if (part := self._part(node)) is None:
            return
        counts = self._counts["forward" if node is None else "backward", part, name]
        counts[0] += 1
        counts[1] += sum({id(x): x.numel() * x.element_size() for x in tensors}.values())

    def _part(self, node: Node | None) -> str | None:
        if node is None:
            return self._parts[-1][1]
        number = node._sequence_nr()  # type: ignore[attr-defined]
        return next(part for start, part in reversed(self._parts) if start <= number)

    def rows(self) -> list[dict[str, Any]]:
        """Return a dict for each pass, part and operation, in the order of their first counts."""
        return [
            {"pass": way, "part": part, "operation": name, "count": count, "bytes": size}
            for (way, part, name), (count, size) in self._counts.items()
        ]


def count_layer(recipe: Recipe, instead: AbstractContextManager[object] | None = None) -> Work:
    """Count the operations of the loss and of the middle one of three layers, forward and backward.

    Args:
        recipe: recipe of the layer.
        instead: context manager that replaces functions of this project by other functions, whose
            operations are then counted; None to replace nothing.
    """
    model = recipe.model.model_copy(update={"num_layers": 3})
    training = recipe.training.model_copy(update={"attention_backend": "blocked"})
    recipe = recipe.model_copy(update={"model": model, "training": training})
    # Transformer Engine's norms cannot run on tensors without memory.
    local_layers = mock.patch.object(build, "available_host", return_value="local")
    with process_groups(recipe.parallel, training.seed) as parallel_state:
        work = Work()
        with local_layers, _stand_ins(work):
            network = build.build_model(recipe, parallel_state, initial_weights=False).to("meta")
        stage = network.virtual_stages[0]
        stage.config.bias_activation_fusion = True
        shape = (training.micro_batch_size, training.seq_length)
        tokens = torch.zeros(shape, dtype=torch.long, device="meta")
        with work, _stand_ins(work), instead or nullcontext():
            _name_parts(stage.decoder.layers[1], work)
            stage.output_layer.register_forward_hook(lambda *_: work.enter(LOSS))
            network(tokens, labels=tokens).float().mean().backward()
    return work


def _name_parts(layer: torch.nn.Module, work: Work) -> None:
    """Add hooks that set the part of ``work`` while a module of the layer runs."""
    stack: list[str | None] = [None]

    def entering(part: str) -> Callable[..., None]:
        def enter(*_: object) -> None:
            stack.append(part)
            work.enter(part)

        return enter

    def leave(*_: object) -> None:
        stack.pop()
        work.enter(stack[-1])

    for name, part in PARTS.items():
        module = layer.get_submodule(name)
        module.register_forward_pre_hook(entering(part))
        module.register_forward_hook(leave)


@contextmanager
def _stand_ins(work: Work) -> Iterator[None]:
    """Replace functions that are one kernel on a GPU, but several operations on the meta device.

    Each replacement counts in ``work`` as one operation; that of the attention kernels does not
    count.
    """

    def attention(*inputs: Tensor, **_: object) -> Tensor:
        query, *_, value = (x for x in inputs if x.dim() == 4)
        return _stand_in(None, (*query.shape[:3], value.shape[3]), *inputs)

    def norm(hidden: Tensor, _: object, weight: Tensor, __: float) -> Tensor:
        return _stand_in(partial(work.count, "rms_norm"), hidden.shape, hidden, weight)

    def subtraction(heads: Tensor, lambda_: Tensor, **_: object) -> Tensor:
        shape = (*lambda_.shape, heads.shape[-1])
        return _stand_in(partial(work.count, "subtract_noise"), shape, heads, lambda_)

    def swiglu(projections: Tensor, *_: object) -> Tensor:
        shape = (*projections.shape[:-1], projections.shape[-1] // 2)
        return _stand_in(partial(work.count, "swiglu"), shape, projections)

    def loss(logits: Tensor, labels: Tensor, *_: object) -> tuple[Tensor, None]:
        return _stand_in(partial(work.count, "cross_entropy"), labels.shape, logits), None

    with (
        mock.patch.object(language_model_loss, "_has_kernel", lambda _: True),
        mock.patch.object(cross_entropy_kernel, "cross_entropy", loss),
        mock.patch.object(whole_sequence, "diff_attention", attention),
        mock.patch.object(whole_sequence, "softmax_attention", attention),
        mock.patch.object(whole_sequence, "subtract_noise", subtraction),
        mock.patch.object(mlp, "bias_swiglu_impl", swiglu),
        mock.patch.object(torch.nn.functional, "rms_norm", norm),
    ):
        yield


@contextmanager
def _megatrons() -> Iterator[None]:
    """Use Megatron-core's default rotary embedding and loss."""

    def rotated(query: Tensor, key: Tensor, angles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        query, key = (
            _apply_rotary_pos_emb_bshd(
                x.flatten(2, -2), angles, rotary_interleaved=False, mscale=scale
            )
            for x in (query, key)
        )
        return query, key

    with (
        mock.patch.object(language_model_loss, "_has_kernel", lambda _: False),
        mock.patch.object(self_attention, "rotate", rotated),
    ):
        yield


def _stand_in(count: Count | None, shape: Sequence[int], *inputs: Tensor) -> Tensor:
    result: Tensor = _OneKernel.apply(count, shape, *inputs)
    return result


class _OneKernel(torch.autograd.Function):
    """An operation that counts as one kernel in each pass, or not at all if ``count`` is None.

    The forward pass reads the inputs and writes the result. The backward pass reads the result's
    gradient and the inputs, and writes the inputs' gradients. Nothing is computed.
    """

    @staticmethod
    def forward(ctx: Any, count: Count | None, shape: Sequence[int], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.count = count
        result = inputs[0].new_empty(shape)
        if count is not None:
            count([*inputs, result])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = [torch.empty_like(x) for x in ctx.saved_tensors]
        if ctx.count is not None:
            ctx.count([grad, *ctx.saved_tensors, *grads])
        return None, None, *grads


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table of operations and MiB.

    It has a row for each part of the layer and pass, and a column for each network.
    """
    names = list(report["operations"])
    parts = list(dict.fromkeys(PARTS.values()))
    lines = [
        f"A layer of hidden size {report['hidden_size']}, {report['tokens']} tokens, "
        f"{report['precision']}: operations, MiB read and written, without the attention kernels",
        "",
        f"| part | pass | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
    ]
    for part in [*parts, ALL, LOSS]:
        for way in ("forward", "backward"):
            cells = [_cell(report["operations"][name], part, way) for name in names]
            lines.append(f"| {part} | {way} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: list[dict[str, Any]], part: str, way: str) -> str:
    parts = set(PARTS.values()) if part == ALL else {part}
    chosen = [row for row in rows if row["pass"] == way and row["part"] in parts]
    count, size = (sum(row[key] for row in chosen) for key in ("count", "bytes"))
    return f"{count}, {size / 2**20:.0f}"
