"""The layouts that must all be the same run, how they are run, and how far they are from it.

Each number of ranks is one launch that trains all its layouts, one after the other; the reference
of a layout is one process that trains the same model. ``test_layouts.py`` asserts it;
``python -m tests.parallel.matrix`` writes it into the table of docs/parallelism.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from diffmegatron.checkpoint.contents import open_checkpoint
from diffmegatron.config.load import load_recipe
from diffmegatron.data.prepare import prepare
from diffmegatron.training.metrics import read_metrics
from diffmegatron.training.trainer import train
from tests.conftest import TINY
from tests.parallel.worker import initial_hash

STEPS = 10
REPOSITORY = Path(__file__).parent.parent.parent
DOCS = REPOSITORY / "docs" / "parallelism.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"

TENSOR = ("parallel.tensor=2",)
SEQUENCE = (*TENSOR, "parallel.sequence_parallel=true")
PIPELINE = ("parallel.pipeline=2",)
INTERLEAVED = (*PIPELINE, "parallel.virtual_pipeline=2")
ZERO2, ZERO3 = ("parallel.zero_stage=2",), ("parallel.zero_stage=3",)
OFFLOAD = ("parallel.offload_optimizer=true", "training.offload_activations=true")
LEAN = ("recompute.granularity=full", "training.loss_chunk=24")
DOCUMENTS = ("data.reset_attention_mask=true", "data.reset_position_ids=true")

# What one process trains: four differential heads on two key-value heads, and variations.
MODELS: dict[str, tuple[str, ...]] = {
    "gqa": (),
    "mha": ("model.num_kv_heads=4",),
    "softmax": ("model.attention=softmax",),
    "tied": ("model.tied_embeddings=true",),
    "deep": ("model.num_layers=4", "model.tied_embeddings=true"),
    "documents": DOCUMENTS,
    "bf16": ("training.precision=bf16",),
}


def context(size: int, exchange: str) -> tuple[str, ...]:
    """The overrides of context parallelism."""
    return (f"parallel.context={size}", f"parallel.context_exchange={exchange}")


@dataclass(frozen=True)
class Layout:
    """A model on some ranks; ``words`` is how the docs call the layout."""

    model: str
    ranks: int
    words: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """For the folder and the test."""
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
        ("gqa", 2, "DP2 ZeRO 1", ()),
        ("gqa", 2, "DP2 ZeRO 2", ZERO2),
        ("gqa", 2, "DP2 ZeRO 3", ZERO3),
        ("tied", 2, "DP2 ZeRO 3 + offload", (*ZERO3, *OFFLOAD)),
        ("gqa", 2, "DP2 ZeRO 2 + offload", (*ZERO2, *OFFLOAD)),
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
        ("bf16", 2, "DP2 ZeRO 1", ()),
        ("bf16", 2, "DP2 ZeRO 2", ZERO2),
        ("bf16", 2, "DP2 ZeRO 3", ZERO3),
        ("bf16", 2, "CP2 ring", context(2, "ring")),
        ("gqa", 4, "TP2 + SP x DP2 ZeRO 2", (*SEQUENCE, *ZERO2)),
        ("gqa", 4, "TP2 + SP x DP2 ZeRO 3", (*SEQUENCE, *ZERO3)),
        ("tied", 4, "TP2 x PP2", (*TENSOR, *PIPELINE)),
        ("deep", 4, "TP2 + SP x PP2 interleaved", (*SEQUENCE, *INTERLEAVED)),
        ("tied", 4, "PP2 x DP2", PIPELINE),
        ("gqa", 4, "TP2 + SP x CP2 ring", (*SEQUENCE, *context(2, "ring"))),
        ("gqa", 4, "PP2 x CP2 ring", (*PIPELINE, *context(2, "ring"))),
        ("softmax", 4, "CP2 Ulysses x DP2 ZeRO 2", (*ZERO2, *context(2, "ulysses"))),
        ("documents", 4, "CP4 ring", context(4, "ring")),
        ("documents", 4, "CP4 all-gather", context(4, "all_gather")),
        ("mha", 4, "CP4 Ulysses", context(4, "ulysses")),
        ("tied", 8, "TP2 + SP x PP2 x DP2", (*SEQUENCE, *PIPELINE)),
        ("gqa", 8, "TP2 + SP x CP2 ring x DP2 ZeRO 3", (*SEQUENCE, *ZERO3, *context(2, "ring"))),
        (
            "deep", 8, "TP2 x PP2 interleaved x CP2 ring",
            (*TENSOR, *INTERLEAVED, *context(2, "ring")),
        ),
    )
)  # fmt: skip


def run_models(recipe_file: Path, out: Path) -> None:
    """Train every model in this process, into folders of ``out``."""
    for name, overrides in MODELS.items():
        recipe = load_recipe(recipe_file, [*_common(), *overrides, f"run_dir={out}/{name}"])
        train(recipe)
        (out / name / "initial.txt").write_text(initial_hash(recipe))


def run_layouts(recipe_file: Path, out: Path, ranks: int) -> None:
    """Train the layouts of that many ranks, in one launch, into folders of ``out``."""
    jobs = [
        f"{layout.name}={','.join((*_common(), *MODELS[layout.model], *layout.overrides))}"
        for layout in LAYOUTS
        if layout.ranks == ranks
    ]
    launch(ranks, "tests.parallel.worker", [str(recipe_file), str(out), *jobs])


def launch(ranks: int, module: str, arguments: list[str]) -> str:
    """Run a module on some ranks; its standard output.

    Raises:
        AssertionError: it failed, with the end of what it said.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=400)
    except BaseException:
        # Killed, torchrun would leave its ranks behind; asked to end, it ends them.
        process.terminate()
        process.wait(timeout=60)
        raise
    assert process.returncode == 0, output[-2000:] + errors[-4000:]
    return output


def series(run_dir: Path, name: str) -> list[float]:
    """What a run logged under a name, step by step."""
    return [entry[name] for entry in read_metrics(run_dir) if name in entry]


def loss_difference(run: Path, reference: Path) -> float:
    """The largest relative difference of a step's loss, over all steps."""
    expected, actual = series(reference, "train/loss"), series(run, "train/loss")
    assert len(expected) == len(actual) == STEPS
    return max(abs(a - e) / e for a, e in zip(actual, expected, strict=True))


def gradient_difference(run: Path, reference: Path) -> tuple[float, float]:
    """How far the gathered gradient after step 1 is, by its norm, and tensor by tensor.

    The second is the largest of any named tensor, relative to that tensor's norm. A lambda vector's
    is what is left of large terms that cancel, so that it shows rounding a hundred times enlarged,
    and is there to show a missing or doubled sum.

    Read from the first checkpoint, where Adam's first moment is a tenth of the clipped gradient.
    """
    saved, expected = (
        open_checkpoint(folder / "checkpoints" / "step_00000001").tensors
        for folder in (run, reference)
    )
    assert sorted(saved.names()) == sorted(expected.names())
    norms = []
    for name in expected.names():
        whole = expected.whole("exp_avg", name)
        off = saved.whole("exp_avg", name) - whole
        norms.append((torch.linalg.vector_norm(off), torch.linalg.vector_norm(whole)))
    off, whole = torch.tensor(norms).unbind(1)
    of_all = torch.linalg.vector_norm(off) / torch.linalg.vector_norm(whole)
    return of_all.item(), (off / whole).max().item()


def _common() -> tuple[str, ...]:
    return (f"training.steps={STEPS}", "checkpoint.interval=1")


def measure(out: Path) -> list[dict[str, object]]:
    """How far each finished layout of ``out`` is from one process."""
    rows = []
    for layout in LAYOUTS:
        run, reference = out / layout.name, out / layout.model
        of_all, of_one_tensor = gradient_difference(run, reference)
        initial = (folder / "initial.txt" for folder in (run, reference))
        rows.append(
            {
                "layout": layout.words,
                "model": layout.model,
                "ranks": layout.ranks,
                "same_initial_bits": len({path.read_text() for path in initial}) == 1,
                "loss": loss_difference(run, reference),
                "gradient": of_all,
                "gradient_of_one_tensor": of_one_tensor,
            }
        )
    return rows


def table(rows: list[dict[str, object]]) -> str:
    """The rows as docs/parallelism.md shows them."""
    lines = [
        "| layout | model | ranks | initial weights | loss, 10 steps | gradient | one tensor's |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        bits = "same bits" if row["same_initial_bits"] else "differ"
        differences = " | ".join(
            f"{row[key]:.0e}" for key in ("loss", "gradient", "gradient_of_one_tensor")
        )
        lines.append(
            f"| {row['layout']} | {row['model']} | {row['ranks']} | {bits} | {differences} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the matrix and write its table, into benchmarks/results and docs/parallelism.md."""
    argparse.ArgumentParser(
        prog="python -m tests.parallel.matrix",
        description="Train every layout and, in one process, its model, which takes minutes on two "
        "cores; then write benchmarks/results/layout_matrix.json and the table of "
        "docs/parallelism.md anew.",
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        prepare([REPOSITORY / "diffmegatron"], out / "code", "bytes", pattern="*.py")
        (out / "tiny.yaml").write_text(TINY.format(run_dir=out / "unused", corpus=out / "code"))
        run_models(out / "tiny.yaml", out)
        for ranks in sorted({layout.ranks for layout in LAYOUTS}):
            run_layouts(out / "tiny.yaml", out, ranks)
        rows = measure(out)
    results = REPOSITORY / "benchmarks" / "results" / "layout_matrix.json"
    versions = {name: version(name) for name in ("torch", "megatron-core", "deepspeed")}
    results.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    before, _, rest = DOCS.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    DOCS.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}")


if __name__ == "__main__":
    main()
