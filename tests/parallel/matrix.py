"""Parallel layouts that must train like one process, and functions that measure the differences.

One launch for each number of ranks trains all layouts with this number, one after the other. Each
layout is compared with one process that trains the same model. ``test_layouts.py`` asserts that the
differences are small. ``python -m tests.parallel.matrix`` writes the differences into the table of
docs/results/layout_matrix.md and into docs/results. With the Python files of Transformer Engine, it
also trains the layouts in FP8 (:mod:`tests.transformer_engine`). Without them, it keeps their rows.
"""

import argparse
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.config.load import load_recipe
from diffmegatron.training.monitoring.metrics import read_metrics
from tests import forks
from tests.conftest import TINY, prepare_corpus
from tests.parallel.worker import train_hashing
from tests.paths import RESULTS
from tests.ranks import launch
from tests.transformer_engine import emulates_fp8, environment
from tests.transformer_engine.fp8_runs import in_fp8

STEPS = 6
PAGE = RESULTS / "layout_matrix.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"

TENSOR = ("parallel.tensor=2",)
SEQUENCE = (*TENSOR, "parallel.sequence_parallel=true")
# Two microbatches, so that a pipeline has two steps and gradients accumulate.
TWO = ("training.micro_batch_size=2",)
PIPELINE = ("parallel.pipeline=2", *TWO)
INTERLEAVED = (*PIPELINE, "parallel.virtual_pipeline=2")
ZERO2, ZERO3 = ("parallel.zero_stage=2",), ("parallel.zero_stage=3",)
OFFLOAD = ("parallel.offload_optimizer=true", "training.offload_activations=true")
LEAN = ("recompute.granularity=full", "training.loss_chunk=24")
DOCUMENTS = ("data.reset_attention_mask=true",)

# The time of a step with such a small network is proportional to the number of microbatches. So a
# step has only one microbatch, unless another override sets micro_batch_size.
COMMON = (
    f"training.steps={STEPS}", "checkpoint.interval=1", "training.seq_length=128",
    "training.global_batch_size=4", "training.micro_batch_size=4",
)  # fmt: skip
SMALL = ("training.micro_batch_size=1",)
Z_LOSS = ("training.z_loss=0.01",)
V2 = ("model.attention.kind=diff_v2",)
YARN = (
    "model.rope_scaling={kind: yarn, factor: 8, original_length: 96, beta_fast: 8, "
    "attention_factor: 1.3}",
)
QK_NORM = ("model.attention.qk_norm=true",)
GATE = ("model.attention.output_gate=elementwise",)
HEAD_GATE = ("model.attention.output_gate=headwise",)
GROUPED = ("model.attention.kind=grouped", "model.attention.signal_per_noise=2")
DEX = ("model.attention.kind=dex", "model.attention.projection_init={kind: identity, scale: 0.5}")
# With two tensor-parallel ranks, all selected heads of the first layer are on one rank. In the
# second layer, one rank has one selected head and the other rank has two.
DEX_2 = (
    *DEX, "model.attention.selected_heads=[[0, 1], [1, 2, 3]]",
    "model.attention.annealing_steps=null",
)  # fmt: skip
# lambda is annealed in the first four of the six steps and is only learned after them. The third
# layer has no selected head.
DEX_4 = (
    *DEX, "model.attention.selected_heads=[[0, 1], [7], [], [0, 1, 2, 5]]",
    "model.attention.annealing_steps=4",
)  # fmt: skip
# The layers have three kinds of attention. A pipeline stage has only some of the kinds.
PATTERN = (
    "model.num_layers=4",
    "model.attention=[{kind: diff_v1, num_heads: 2, layers: 3-4}, {kind: diff_v2, num_heads: 4, "
    "num_kv_heads: 2, layers: 1}, {kind: softmax, num_heads: 4, num_kv_heads: 2}]",
)
# Four context-parallel ranks have chunks of 16 tokens. The window of 50 covers some of them
# completely and is longer than a document, and no chunk sees all earlier ones.
WINDOWS = (
    "model.num_layers=4",
    "model.attention=[{kind: diff_v1, num_heads: 2, window: 20, layers: 1}, {kind: diff_v2, "
    "num_heads: 4, num_kv_heads: 2, window: 50, layers: 3-4}, {kind: softmax, num_heads: 4, "
    "num_kv_heads: 2}]",
)
MUON = ("optimizer.kind=muon",)
# Networks have four base widths.
MUP = ("model.initialization={scheme: mup, base_hidden_size: 16}",)
# In models with two signal heads per noise head, each key-value head has two noise heads.
DEEP = ("model.attention.num_heads=8", "model.num_layers=4", *DOCUMENTS)

# Only some tensors are trained, with two learning rates. All others are frozen, for instance the
# query rows of the fused QKV projection, half of the lambda vectors, and the embedding.
PART = (
    "optimizer.trainable=['*.linear_qkv.weight:[kv]', '*.linear_proj.weight', '*.lambda_?1']",
    "optimizer.lr_multipliers={'*.lambda_??': 5}",
    "model.tied_embeddings=true",
)

# Overrides of each model. "gqa" has four differential heads on two key-value heads.
MODELS: dict[str, tuple[str, ...]] = {
    "gqa": TWO,
    "mha": ("model.attention.num_kv_heads=4",),
    "softmax": ("model.baseline=true", *Z_LOSS),
    "tied": ("model.tied_embeddings=true", *Z_LOSS, *HEAD_GATE, *MUP),
    "deep": ("model.num_layers=4", "model.tied_embeddings=true", *YARN, *QK_NORM, *GATE, *MUP),
    # With document masks, context parallelism sends the two sequences of a microbatch one by one.
    "documents": (
        *DOCUMENTS,
        "training.seq_length=256",
        "training.global_batch_size=2",
        "training.micro_batch_size=2",
    ),
    "bf16": ("training.precision=bf16",),
    "v2": (*V2, *YARN, *HEAD_GATE),
    # The logged lambda is the mean over tokens of the last microbatch. So the run of one process
    # needs the same micro_batch_size as the layouts.
    "v2-deep": (*V2, "model.attention.signal_per_noise=2", *DEEP, *TWO, *QK_NORM),
    "grouped": (*GROUPED, *QK_NORM, *GATE),
    "grouped-deep": (*GROUPED, *DEEP),
    "part": PART,
    "lora": ("model.lora={rank: 4, alpha: 8}",),
    "dex": DEX_2,
    "dex-deep": (*DEX_4, *DEEP),
    "pattern": (*PATTERN, *TWO),
    "windows": (*WINDOWS, *TWO),
    "windows-documents": (*WINDOWS, *DOCUMENTS, *TWO),
    "muon": (*MUON, "model.tied_embeddings=true", *MUP),
    "muon-v2": (
        *MUON,
        *V2,
        "optimizer.muon={per_head: true, lr: 0.002}",
        "model.attention.output_gate=elementwise",
    ),
    "muon-part": (*MUON, *PART),
    "muon-dex": (*MUON, *DEX_2),
    "muon-pattern": (*MUON, *PATTERN, *TWO),
    "muon-bf16": (*MUON, "training.precision=bf16"),
}


# Models of the layouts in FP8, without their products in FP8: one process trains them in bf16 by
# Megatron-core's layers.
FP8_MODELS: dict[str, tuple[str, ...]] = {
    "fp8": ("training.precision=bf16",),
    "fp8-deep": ("training.precision=bf16", "model.num_layers=4", *TWO),
}


def context(size: int, communication: str) -> tuple[str, ...]:
    """Return the overrides of context parallelism."""
    return (f"parallel.context={size}", f"parallel.context_communication={communication}")


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a model.

    Attributes:
        model: name of the model in MODELS.
        ranks: number of ranks.
        words: name of the layout in the docs.
        overrides: overrides of the recipe.
    """

    model: str
    ranks: int
    words: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the layout's folder and of its tests."""
        words = self.words.lower().replace(" + ", "+").replace(" x ", "x").replace(" ", "-")
        return f"{self.model}:{words}"


LAYOUTS = tuple(
    Layout(*row)
    for row in (  # model, ranks, words, overrides
        ("gqa", 2, "TP2", TENSOR),
        ("gqa", 2, "TP2 + SP", SEQUENCE),
        ("mha", 2, "TP2 + SP", SEQUENCE),
        ("softmax", 2, "TP2 + SP", SEQUENCE),
        ("gqa", 2, "TP2 + SP + recompute + loss chunks", (*SEQUENCE, *LEAN)),
        ("gqa", 2, "DP2 ZeRO 1", SMALL),
        ("tied", 2, "DP2 ZeRO 1 + recompute + loss chunks", (*LEAN, *SMALL)),
        ("gqa", 2, "DP2 ZeRO 2", (*ZERO2, *SMALL)),
        ("gqa", 2, "DP2 ZeRO 3", (*ZERO3, *SMALL)),
        ("tied", 2, "DP2 ZeRO 3 + offload", (*ZERO3, *OFFLOAD, *SMALL)),
        ("gqa", 2, "DP2 ZeRO 2 + offload", (*ZERO2, *OFFLOAD, *SMALL)),
        ("gqa", 2, "PP2", PIPELINE),
        ("tied", 2, "PP2 + offload", (*PIPELINE, *OFFLOAD)),
        ("deep", 2, "PP2 interleaved", INTERLEAVED),
        ("gqa", 2, "CP2 ring", context(2, "ring")),
        ("gqa", 2, "CP2 Ulysses", context(2, "ulysses")),
        ("softmax", 2, "CP2 ring", context(2, "ring")),
        ("softmax", 2, "CP2 all-gather", context(2, "all_gather")),
        ("documents", 2, "CP2 ring", context(2, "ring")),
        ("documents", 2, "CP2 all-gather", context(2, "all_gather")),
        ("documents", 2, "CP2 Ulysses", context(2, "ulysses")),
        ("bf16", 2, "TP2 + SP", SEQUENCE),
        ("bf16", 2, "DP2 ZeRO 1", SMALL),
        ("bf16", 2, "DP2 ZeRO 2", (*ZERO2, *SMALL)),
        ("bf16", 2, "DP2 ZeRO 3", (*ZERO3, *SMALL)),
        ("bf16", 2, "CP2 ring", context(2, "ring")),
        # Without sequence parallelism, a rank computes lambda for all heads and uses those of its
        # own heads.
        ("v2", 2, "TP2", TENSOR),
        ("v2-deep", 2, "CP2 all-gather", context(2, "all_gather")),
        *(
            (variant + model, 2, words, overrides)
            for variant in ("v2", "grouped")
            for model, words, overrides in (
                ("", "TP2 + SP", SEQUENCE),
                ("", "DP2 ZeRO 1", TWO),
                ("", "DP2 ZeRO 2", (*ZERO2, *TWO)),
                ("", "DP2 ZeRO 3", (*ZERO3, *TWO)),
                ("", "PP2", PIPELINE),
                ("-deep", "PP2 interleaved", INTERLEAVED),
                ("", "CP2 ring", context(2, "ring")),
                ("-deep", "CP2 Ulysses", context(2, "ulysses")),
            )
        ),
        ("part", 2, "TP2 + SP + recompute + loss chunks", (*SEQUENCE, *LEAN)),
        ("part", 2, "DP2 ZeRO 1", SMALL),
        ("part", 2, "DP2 ZeRO 2 + offload", (*ZERO2, *OFFLOAD, *SMALL)),
        ("part", 2, "DP2 ZeRO 3", (*ZERO3, *SMALL)),
        ("part", 2, "PP2", PIPELINE),
        ("lora", 2, "TP2", TENSOR),
        ("lora", 2, "TP2 + SP + recompute + loss chunks", (*SEQUENCE, *LEAN)),
        ("lora", 2, "DP2 ZeRO 1", SMALL),
        ("lora", 2, "DP2 ZeRO 3", (*ZERO3, *SMALL)),
        ("lora", 2, "PP2", PIPELINE),
        ("lora", 2, "CP2 ring", context(2, "ring")),
        ("part", 4, "TP2 + SP x DP2 ZeRO 3", (*SEQUENCE, *ZERO3, *SMALL)),
        ("lora", 4, "TP2 + SP x PP2", (*SEQUENCE, *PIPELINE)),
        ("dex", 2, "TP2", TENSOR),
        ("dex", 2, "TP2 + SP", SEQUENCE),
        ("dex", 2, "DP2 ZeRO 1", TWO),
        ("dex", 2, "DP2 ZeRO 3", (*ZERO3, *TWO)),
        ("dex", 2, "CP2 ring", context(2, "ring")),
        ("dex-deep", 2, "PP2 interleaved", INTERLEAVED),
        ("pattern", 2, "TP2 + SP", SEQUENCE),
        ("pattern", 2, "DP2 ZeRO 3", (*ZERO3, *SMALL)),
        ("pattern", 2, "PP2 interleaved", INTERLEAVED),
        ("pattern", 2, "CP2 ring", context(2, "ring")),
        ("windows", 2, "PP2 interleaved", INTERLEAVED),
        ("windows", 2, "CP2 Ulysses", context(2, "ulysses")),
        ("windows-documents", 2, "CP2 all-gather", context(2, "all_gather")),
        ("windows-documents", 4, "CP4 ring", context(4, "ring")),
        ("windows", 4, "CP4 ring", context(4, "ring")),
        ("windows", 8, "TP2 + SP x CP2 ring x DP2 ZeRO 3",
         (*SEQUENCE, *ZERO3, *context(2, "ring"))),
        ("windows", 8, "TP2 x PP2 x CP2 all-gather",
         (*TENSOR, *PIPELINE, *context(2, "all_gather"))),
        ("muon", 2, "TP2", TENSOR),
        ("muon", 2, "DP2 ZeRO 1", SMALL),
        ("muon", 2, "DP2 ZeRO 3", (*ZERO3, *SMALL)),
        ("muon", 2, "PP2 + offload", (*PIPELINE, *OFFLOAD)),
        ("muon-v2", 2, "TP2 + SP", SEQUENCE),
        ("muon-part", 2, "DP2 ZeRO 2 + offload", (*ZERO2, *OFFLOAD, *SMALL)),
        ("muon-dex", 2, "TP2 + SP", SEQUENCE),
        ("muon-pattern", 2, "PP2 interleaved", INTERLEAVED),
        ("muon-part", 4, "TP2 + SP x DP2 ZeRO 1", (*SEQUENCE, *SMALL)),
        ("muon-pattern", 4, "TP2 + SP x DP2 ZeRO 3", (*SEQUENCE, *ZERO3, *SMALL)),
        ("muon-bf16", 4, "TP2 + SP x DP2 ZeRO 1", (*SEQUENCE, *SMALL)),
        ("muon", 8, "TP2 + SP x PP2 x DP2", (*SEQUENCE, *PIPELINE, *SMALL)),
        ("muon-v2", 8, "TP2 x CP2 ring x DP2 ZeRO 2", (*TENSOR, *ZERO2, *TWO, *context(2, "ring"))),
        ("gqa", 4, "TP2 + SP x DP2 ZeRO 1", (*SEQUENCE, *SMALL)),
        ("bf16", 4, "TP2 + SP x DP2 ZeRO 1", (*SEQUENCE, *SMALL)),
        ("tied", 4, "DP4 ZeRO 1", SMALL),
        ("gqa", 4, "TP2 + SP x DP2 ZeRO 2", (*SEQUENCE, *ZERO2, *SMALL)),
        ("gqa", 4, "TP2 + SP x DP2 ZeRO 3", (*SEQUENCE, *ZERO3, *SMALL)),
        ("tied", 4, "TP2 x PP2", (*TENSOR, *PIPELINE)),
        ("deep", 4, "TP2 + SP x PP2 interleaved", (*SEQUENCE, *INTERLEAVED)),
        ("tied", 4, "PP2 x DP2", (*PIPELINE, *SMALL)),
        ("gqa", 4, "TP2 + SP x CP2 ring", (*SEQUENCE, *context(2, "ring"))),
        ("gqa", 4, "PP2 x CP2 ring", (*PIPELINE, *context(2, "ring"))),
        ("softmax", 4, "CP2 Ulysses x DP2 ZeRO 2", (*ZERO2, *SMALL, *context(2, "ulysses"))),
        ("documents", 4, "CP4 ring", context(4, "ring")),
        ("documents", 4, "CP4 all-gather", context(4, "all_gather")),
        ("mha", 4, "CP4 Ulysses", context(4, "ulysses")),
        ("tied", 8, "TP2 + SP x PP2 x DP2", (*SEQUENCE, *PIPELINE, *SMALL)),
        ("gqa", 8, "TP2 + SP x CP2 ring x DP2 ZeRO 3", (*SEQUENCE, *ZERO3, *context(2, "ring"))),
        (
            "deep", 8, "TP2 x PP2 interleaved x CP2 ring",
            (*TENSOR, *INTERLEAVED, *context(2, "ring")),
        ),
        *(
            (
                variant, 8, "TP2 + SP x CP2 ring x DP2 ZeRO 3",
                (*SEQUENCE, *ZERO3, *TWO, *context(2, "ring")),
            )
            for variant in ("v2", "grouped")
        ),
    )
)  # fmt: skip


# The ranks of these layouts have Transformer Engine's layers. They save only once.
LAST = ("checkpoint.interval=6",)
LATE = ("parallel.overlap_gradients=false",)
FP8_LAYOUTS = tuple(
    Layout(model, ranks, words, (*LAST, *overrides))
    for model, ranks, words, overrides in (
        ("fp8", 2, "TP2 + SP + recompute + loss chunks",
         (*SEQUENCE, *LEAN, in_fp8("tensorwise"))),
        ("fp8-deep", 2, "PP2 interleaved",
         (*INTERLEAVED, in_fp8("tensorwise", first_layers_bf16=1, last_layers_bf16=2))),
        ("fp8", 2, "DP2 ZeRO 1", (*SMALL, *LATE, in_fp8("delayed"))),
        ("fp8", 2, "CP2 ring", (*context(2, "ring"), *LATE, in_fp8("mxfp8"))),
        ("fp8", 8, "TP2 + SP x PP2 x DP2",
         (*SEQUENCE, *PIPELINE, *SMALL, in_fp8("tensorwise"))),
        ("fp8", 8, "TP2 + SP x CP2 ring x DP2 ZeRO 2",
         (*SEQUENCE, *ZERO2, *TWO, *context(2, "ring"), in_fp8("tensorwise"))),
    )
)  # fmt: skip


def run_models(recipe_file: Path, out: Path, models: Iterable[str] = MODELS) -> None:
    """Train models in this process, each into a folder of ``out``."""
    for name in models:
        overrides = [*COMMON, *(MODELS | FP8_MODELS)[name], f"run_dir={out}/{name}"]
        recipe = load_recipe(recipe_file, overrides)
        digest = train_hashing(recipe)
        (out / name / "initial.txt").write_text(digest)


def run_layouts(recipe_file: Path, out: Path, ranks: int) -> None:
    """Train all layouts of ``ranks`` ranks in one launch, each into a folder of ``out``."""
    layouts = [layout for layout in LAYOUTS if layout.ranks == ranks]
    launch(ranks, "tests.parallel.worker", *(call(recipe_file, out, each) for each in layouts))


def run_fp8_layouts(
    recipe_file: Path, out: Path, ranks: int, variables: Mapping[str, str] | None = None
) -> None:
    """Train the layouts in FP8 of ``ranks`` ranks with Transformer Engine's layers.

    ``variables`` are more environment variables of the ranks.
    """
    calls = [call(recipe_file, out, each) for each in FP8_LAYOUTS if each.ranks == ranks]
    variables = {**environment(), **(variables or {})}
    launch(ranks, "tests.parallel.worker", *calls, environment=variables)


def call(recipe_file: Path, out: Path, layout: Layout) -> list[str]:
    """Return the arguments with which the worker trains a layout."""
    return [
        *(str(recipe_file), str(out), layout.name),
        *(*COMMON, *(MODELS | FP8_MODELS)[layout.model], *layout.overrides),
    ]


def series(run_dir: Path, name: str) -> list[float]:
    """Return the logged values of a metric, step by step."""
    return [entry[name] for entry in read_metrics(run_dir) if name in entry]


def loss_difference(run: Path, reference: Path) -> float:
    """Return the largest relative difference of the training losses over all steps."""
    expected, actual = series(reference, "train/loss"), series(run, "train/loss")
    assert len(expected) == len(actual) == STEPS
    return max(abs(a - e) / e for a, e in zip(actual, expected, strict=True))


def gradient_difference(run: Path, reference: Path, step: int = 1) -> tuple[float, float]:
    """Return two relative differences of the gathered gradients of two runs.

    A relative difference is the norm of the difference, divided by the norm of the reference. The
    gradients are read from Adam's first moments. Frozen tensors have no first moment and are
    skipped.

    The tensors of one parameter in all layers are measured together. Reason: in the gradient of a
    lambda vector, large terms cancel. The relative rounding error of the remainder is a hundred
    times larger, and the remainder of a single layer may be 0.

    Args:
        run: folder of the run.
        reference: folder of the run in one process.
        step: step of the checkpoints to compare. At step 1, the first moment is a tenth of the
            clipped gradient. At a later step, it depends on the gradients of all steps until then.

    Returns:
        The relative difference over all parameters together, and the largest of a single parameter.
    """
    saved, expected = (
        open_checkpoint(folder / "checkpoints" / f"step_{step:08d}").tensors
        for folder in (run, reference)
    )
    assert sorted(saved.names()) == sorted(expected.names())
    squares: dict[str, Tensor] = defaultdict(lambda: torch.zeros(2, dtype=torch.float64))
    for name in expected.names():
        assert saved.kinds(name) == expected.kinds(name)
        if "exp_avg" not in expected.kinds(name):
            continue
        whole = expected.read_tensor("exp_avg", name).double()
        off = saved.read_tensor("exp_avg", name).double() - whole
        parameter = re.sub(r"\.layers\.\d+\.", ".layers.*.", name)
        squares[parameter] += torch.stack((off.square().sum(), whole.square().sum()))
    off, whole = torch.stack(list(squares.values())).unbind(1)
    # A gradient that is zero in both runs counts as equal. In the first step, the gradients of
    # LoRA's A and DEX's W_D are zero.
    relative = (off / whole).nan_to_num(0.0, posinf=torch.inf)
    return (off.sum() / whole.sum()).sqrt().item(), relative.sqrt().max().item()


def measure(out: Path, layouts: Iterable[Layout]) -> list[dict[str, object]]:
    """Return a row for each layout: differences between its run in ``out`` and one process.

    The gradients of layouts in FP8 are not compared.
    """
    rows = []
    for layout in layouts:
        run, reference = out / layout.name, out / layout.model
        of_all, of_one_parameter = None, None
        if layout.model in MODELS:
            of_all, of_one_parameter = gradient_difference(run, reference)
        initial = (folder / "initial.txt" for folder in (run, reference))
        rows.append(
            {
                "layout": layout.words,
                "model": layout.model,
                "ranks": layout.ranks,
                "same_initial_bits": len({path.read_text() for path in initial}) == 1,
                "loss": loss_difference(run, reference),
                "gradient": of_all,
                "gradient_of_one_parameter": of_one_parameter,
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """Return the rows as the Markdown table of docs/results/layout_matrix.md."""
    lines = [
        f"| layout | model | ranks | same start | loss, {STEPS} steps | gradient "
        "| one parameter's |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bits = "same bits" if row["same_initial_bits"] else "differ"
        differences = " | ".join(
            "" if row[key] is None else f"{row[key]:.0e}"
            for key in ("loss", "gradient", "gradient_of_one_parameter")
        )
        lines.append(
            f"| {row['layout']} | {row['model']} | {row['ranks']} | {bits} | {differences} |"
        )
    return "\n".join(lines)


def write_results(rows: list[dict[str, object]]) -> None:
    """Write the rows to docs/results and to the table of docs/results/layout_matrix.md."""
    versions = {name: version(name) for name in ("torch", "megatron-core", "deepspeed")}
    (RESULTS / "layout_matrix.json").write_text(
        json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n"
    )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


def main() -> None:
    """Run the matrix and write its rows to docs/results and docs/results/layout_matrix.md."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.parallel.matrix",
        description="Train every layout and, in one process, its model, which takes minutes on two "
        "cores; then write docs/results/layout_matrix.json and the table of "
        "docs/results/layout_matrix.md.",
    )
    parser.add_argument(
        "--only-fp8", action="store_true", help="layouts in FP8; other rows stay as they are"
    )
    only_fp8 = parser.parse_args().only_fp8
    before = json.loads((RESULTS / "layout_matrix.json").read_text())["rows"]
    rows = [row for row in before if row["model"] not in FP8_MODELS]
    fp8 = [row for row in before if row["model"] in FP8_MODELS]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        forks.open_folder()
        exits.callback(forks.close_folder)
        out = Path(folder)
        corpus = prepare_corpus(out / "corpus")
        file = out / "tiny.yaml"
        file.write_text(TINY.format(run_dir=out / "unused", corpus=corpus))
        if not only_fp8:
            run_models(file, out)
            for ranks in sorted({layout.ranks for layout in LAYOUTS}):
                run_layouts(file, out, ranks)
            rows = measure(out, LAYOUTS)
        if only_fp8 or emulates_fp8():
            run_models(file, out, FP8_MODELS)
            for ranks in sorted({layout.ranks for layout in FP8_LAYOUTS}):
                run_fp8_layouts(file, out, ranks)
            fp8 = measure(out, FP8_LAYOUTS)
    write_results(rows + fp8)


if __name__ == "__main__":
    main()
