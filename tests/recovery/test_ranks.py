"""Tests of faults and resumes on two and four ranks.

The runs are compared with runs of one process.
"""

import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch

from diffmegatron.checkpoint.checkpoint_format import open_checkpoint
from diffmegatron.checkpoint.checkpoint_store import CheckpointStore
from diffmegatron.config.load import load_recipe
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.training import trainer
from diffmegatron.training.monitoring.metrics import read_metrics
from diffmegatron.training.trainer import train
from tests.conftest import TINY
from tests.ranks import launch

TENSOR = ["parallel.tensor=2", "parallel.sequence_parallel=true"]
PIPELINE = ["parallel.pipeline=2"]
ZERO2 = ["parallel.zero_stage=2", "training.micro_batch_size=2"]
ZERO3 = ["parallel.zero_stage=3"]
CONTEXT = ["parallel.context=2"]
BF16 = ["training.precision=bf16"]
MUON = ["optimizer.kind=muon"]
OFFLOAD = ["parallel.offload_optimizer=true"]
MICRO = ["training.micro_batch_size=2"]
SHORT = ["training.steps=8", "checkpoint.interval=4", "training.eval_batches=0"]
LONG = [
    "training.steps=60",
    "checkpoint.interval=100",
    "training.eval_batches=0",
    "training.global_batch_size=4",
    "training.micro_batch_size=2",
]
SOURCES = ("words", "digits")

# Name -> ranks and layout until step 10, then ranks and layout of the resumed run until step 20.
RESUMES = {
    "one-to-tensor": (1, [], 2, TENSOR),
    "one-to-pipeline": (1, [], 2, PIPELINE),
    "tensor-to-data": (2, TENSOR, 2, MICRO),
    "data-to-zero2": (2, [], 2, ZERO2),
    "zero2-to-pipeline": (2, ZERO2, 2, PIPELINE),
    "pipeline-to-tensor": (2, PIPELINE, 2, TENSOR),
    "zero2-to-one": (2, ZERO2, 1, MICRO),
    "context-to-zero3": (2, CONTEXT, 2, ZERO3),
    "zero3-to-one": (2, ZERO3, 1, []),
    "bf16-to-zero3": (2, [*BF16, *TENSOR], 2, [*BF16, *ZERO3]),
    "muon-to-four": (2, [*MUON, *TENSOR], 4, [*MUON, *PIPELINE, *MICRO]),
    "tensor-to-four": (2, TENSOR, 4, [*TENSOR, *ZERO2]),
    "zero2-to-four": (2, ZERO2, 4, [*TENSOR, *PIPELINE]),
}
# Runs that start with the final weights of the run "data" and freeze most of them.
PART = ["optimizer.trainable=['*.linear_qkv.weight:v', '*.lambda_?1']", "training.steps=3"]
PARTS = {"part": [*PART, *MICRO], "part-bf16": [*PART, *BF16, *ZERO3]}
NANS = {
    "nan-data": [],
    "nan-zero2": ZERO2,
    "nan-zero3": ZERO3,
    "nan-tensor": TENSOR,
    "nan-pipeline": PIPELINE,
    "nan-bf16": BF16,
    "nan-bf16-zero2": BF16 + ZERO2,
    "nan-bf16-zero3": BF16 + ZERO3,
    "nan-offload": OFFLOAD,
    "nan-bf16-offload": BF16 + OFFLOAD,
    "nan-bf16-offload-pipeline": BF16 + OFFLOAD + PIPELINE,
    "nan-bf16-zero3-offload": BF16 + ZERO3 + OFFLOAD,
}


@pytest.fixture(scope="module")
def out(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all runs; return the folder with the runs and with the ranks' files of outcomes."""
    out = tmp_path_factory.mktemp("ranks")
    recipe = out / "tiny.yaml"
    sources = f"{corpus}}}, {{path: {prepare_digits(out)}, weight: 0.5"
    recipe.write_text(TINY.format(run_dir=out / "unused", corpus=sources))

    def job(name: str, overrides: list[str], fault: tuple | None = None) -> dict:
        values = {"name": name, "recipe": str(recipe), "overrides": [*overrides]}
        values["overrides"].append(f"run_dir={out / name}")
        return values | ({"fault": fault} if fault else {})

    train(load_recipe(recipe, [f"run_dir={out / 'one'}"]))
    train(load_recipe(recipe, [*BF16, f"run_dir={out / 'one-bf16'}"]))
    train(load_recipe(recipe, [*MUON, f"run_dir={out / 'one-muon'}"]))
    train(load_recipe(recipe, [*LONG, f"run_dir={out / 'long'}"]))
    run_jobs(
        2,
        out / "first",
        [
            job("tensor", TENSOR),
            job("data", []),
            job("zero2", ZERO2),
            job("zero3", ZERO3),
            job("context", CONTEXT),
            job("bf16", [*BF16, *TENSOR]),
            job("muon", [*MUON, *TENSOR]),
            job("pipeline", PIPELINE),
            *(
                job(name, [*SHORT, *layout], ("nan_gradient", 1, 5))
                for name, layout in NANS.items()
            ),
            job("failing", SHORT, ("failing", 1, 1)),
            job("full", SHORT, ("failing", 1, 99)),
            job("signalled", SHORT, ("signalled", 1, 5)),
            job("late", [*LONG, *CONTEXT], ("signalled", 1, 52)),
        ],
    )
    for name in RESUMES:
        shutil.copytree(out / name.split("-")[0], out / name)
        shutil.rmtree(out / name / "checkpoints" / "step_00000020")
    for ranks in (2, 4):
        jobs = [job(name, to) for name, (_, _, size, to) in RESUMES.items() if size == ranks]
        if ranks == 2:
            jobs += [job("signalled", SHORT), job("late", [*LONG, *ZERO3])]
            jobs += [job("astray", [*SHORT, start_from_damaged(out)])]
            start = f"checkpoint.start_from={out / 'data'}"
            jobs += [job(name, [*overrides, start]) for name, overrides in PARTS.items()]
        run_jobs(ranks, out / f"then{ranks}", jobs)
    for name, (_, _, size, to) in RESUMES.items():
        if size == 1:
            train(load_recipe(recipe, [*to, f"run_dir={out / name}"]))
    return out


def prepare_digits(folder: Path) -> Path:
    """Prepare a second source and return its prefix."""
    draw = random.Random(0)
    texts = ("".join(draw.choices("0123456789", k=draw.randint(1, 200))) for _ in range(100))
    (folder / "digits.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    prepare([folder / "digits.jsonl"], folder / "digits", "bytes", show_progress=False)
    return folder / "digits"


def start_from_damaged(out: Path) -> str:
    """Copy a checkpoint, and flip a bit in the file that rank 1 verifies.

    Return the override with which a run starts from the copy.
    """
    path = shutil.copytree(out / "data" / "checkpoints" / "step_00000020", out / "step_00000020")
    content = bytearray((path / "rank_00001.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "rank_00001.safetensors").write_bytes(content)
    return f"checkpoint.start_from={path}"


def run_jobs(ranks: int, launched: Path, jobs: list[dict]) -> None:
    calls = ([f"{launched}.{job['name']}", json.dumps(job)] for job in jobs)
    launch(ranks, "tests.recovery.worker", *calls)


def outcomes(out: Path, name: str, launched: str = "first") -> list:
    files = sorted(out.glob(f"{launched}.{name}.[0-9]"))
    return [json.loads(path.read_text()) for path in files]


def series(run_dir: Path, name: str) -> list[float]:
    return [entry[name] for entry in read_metrics(run_dir) if name in entry]


@pytest.mark.parametrize("name", RESUMES)
@pytest.mark.parametrize(
    "metric",
    [
        "train/loss", "train/grad_norm", "valid/loss",
        *(f"train/{what}/{source}" for what in ("loss", "loss_tokens") for source in SOURCES),
    ],
)  # fmt: skip
def test_a_run_resumes_in_another_layout(name, metric, out):
    model = name.partition("-")[0]
    bf16 = model == "bf16"
    expected = series(out / (f"one-{model}" if model in ("bf16", "muon") else "one"), metric)
    assert len(expected) in (2, 20)
    in_bf16 = 1e-2 if metric.endswith("norm") else 1e-3
    tolerance = in_bf16 if bf16 else 1e-6
    assert series(out / name, metric) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", PARTS)
def test_frozen_weights_are_unchanged_on_every_rank(name, out):
    """Check that a run has the frozen weights of the checkpoint from which it starts.

    Each rank reads a share of the weights from the checkpoint. If a rank kept its initial values in
    place of the other ranks' shares, the first loss would be far off.
    """
    source, ended = (
        open_checkpoint(CheckpointStore(out / each).latest()).tensors for each in ("data", name)
    )
    last, first = series(out / "data", "valid/loss")[-1], series(out / name, "valid/loss")[0]
    assert first == pytest.approx(last, rel=1e-3 if "bf16" in name else 1e-6)
    for tensor in ended.names():
        if ended.kinds(tensor) == ("weight",):
            value = source.read_tensor("weight", tensor)
            in_bf16 = "bf16" in name and ".lambda_" not in tensor and ".head_norm" not in tensor
            expected = value.bfloat16().float() if in_bf16 else value
            assert torch.equal(ended.read_tensor("weight", tensor), expected), tensor


@pytest.mark.parametrize(("metric", "tolerance"), [("train/loss", 1e-6), ("train/grad_norm", 1e-3)])
def test_losses_and_norms_stay_close_after_a_late_layout_change(metric, tolerance, out):
    """Check a run that changes from context parallelism to ZeRO 3 at step 52.

    docs/results/recovery.md explains why the gradient norms differ more than the losses.
    """
    assert [outcomes(out, "late", launched) for launched in ("first", "then2")] == [
        [False, False],
        [True, True],
    ]
    expected = series(out / "long", metric)
    assert len(expected) == 60
    assert series(out / "late", metric) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("name", NANS)
def test_a_nan_on_one_rank_is_skipped_by_all(name, out):
    assert outcomes(out, name) == [True, True]
    state = open_checkpoint(CheckpointStore(out / name).latest()).state
    assert (state["step"], state["updates"], state["guard"]["skipped"]) == (8, 7, 1)
    event = json.loads((out / name / "events" / "step_00000005.json").read_text())
    assert event["reason"] == "gradient norm is inf"
    assert isinstance(event["loss"], float)
    # A skipped step does not change the weights, so the lambda of step 5 equals that of step 4.
    before = {entry["step"]: entry for entry in read_metrics(out / name) if "train/loss" in entry}
    assert event["lambda"] == {key: before[4][key] for key in event["lambda"]}
    assert len(event["lambda"]) == 2


def test_the_event_names_the_rank_and_the_layer(out):
    """Check that the event shows the NaN in one layer of one rank.

    The norms in the event are computed before gradients are summed over data-parallel ranks. So the
    NaN does not spread to the other rank.
    """
    event = json.loads((out / "nan-data" / "events" / "step_00000005.json").read_text())
    healthy, guilty = event["ranks"]
    assert healthy["not_finite"] == []
    assert len(guilty["not_finite"]) == 1
    assert guilty["not_finite"][0].startswith("decoder.layers.0.")
    assert guilty["gradient_norm_by_layer"]["layer_01"] == "nan"
    assert math.isfinite(guilty["gradient_norm_by_layer"]["layer_02"])


@pytest.fixture(scope="module")
def skipped(out: Path) -> list[float]:
    """Return the losses of one process that skips its fifth step."""
    real, calls = trainer.forward_backward, []

    def broken(engine, *arguments, **options):
        calls.append(1)
        loss = real(engine, *arguments, **options)
        if len(calls) == 5:
            next(engine.network.parameters()).grad *= math.nan
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "forward_backward", broken)
        train(load_recipe(out / "tiny.yaml", [*SHORT, f"run_dir={out / 'skipped'}"]))
    return series(out / "skipped", "train/loss")


@pytest.mark.parametrize("name", [name for name in NANS if "bf16" not in name])
def test_all_layouts_have_the_same_losses_after_a_skipped_step(name, out, skipped):
    assert series(out / name, "train/loss") == pytest.approx(skipped, rel=1e-6)


def test_a_failed_write_on_one_rank_is_reported_and_retried(out):
    assert outcomes(out, "failing") == [True, True]
    assert CheckpointStore(out / "failing").complete()[-1] == 8
    assert len(CheckpointStore(out / "failing").complete()) == 2
    failures = series(out / "failing", "ckpt/failed")
    assert failures[0] == 1 and failures[-1] == 1
    bytes_written = series(out / "failing", "ckpt/bytes")
    assert len(bytes_written) == 2


def test_a_permanently_full_disk_ends_the_run_with_an_error(out):
    for said in outcomes(out, "full"):
        assert "cannot write " in said and "rank_00001.safetensors: No space left" in said
        assert "(rank 1)" in said
    assert list((out / "full" / "checkpoints").iterdir()) == []


def test_a_stop_signal_to_one_rank_stops_all_ranks(out):
    assert outcomes(out, "signalled") == [False, False]
    assert outcomes(out, "signalled", "then2") == [True, True]
    assert CheckpointStore(out / "signalled").steps() == [4, 5, 8]
    expected = series(out / "failing", "train/loss")
    assert series(out / "signalled", "train/loss") == expected, "must be equal to the bit"


def test_a_damaged_file_found_by_one_rank_is_an_error_on_all_ranks(out):
    said = outcomes(out, "astray", "then2")
    assert said[0] == said[1]
    assert said[0].endswith(
        "rank_00001.safetensors is damaged: its checksum differs from the manifest's (rank 1)"
    )
    assert CheckpointStore(out / "astray").steps() == []


def test_the_slowest_rank_of_each_phase_is_in_the_metrics(out):
    assert set(series(out / "data", "perf/forward_backward_slowest_rank")) <= {0, 1}
    assert all(seconds > 0 for seconds in series(out / "data", "perf/update_seconds_slowest"))
