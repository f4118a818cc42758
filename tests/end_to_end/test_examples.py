"""Every file of examples/ runs, or is planned, on a CPU; the speedrun is rehearsed on two ranks."""

import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diffmegatron import own_code
from diffmegatron.attention.kinds import KINDS
from diffmegatron.config.load import load_stages
from diffmegatron.training.monitoring.metrics import read_metrics
from tests import forks
from tests.paths import ROOT
from tests.ports import reserved_ports
from tests.pretrained import write_pretrained
from tests.robustness.bad_paths import run
from tests.serving import interpreter
from tests.serving.servers import answering, complete, program_command

EXAMPLES = ROOT / "examples"
RECIPES = sorted(each.name for each in EXAMPLES.glob("*.yaml") if "cluster" not in each.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the examples, the launch scripts and an imported model."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(EXAMPLES, folder / "examples")
    (folder / "launch").symlink_to(ROOT / "launch")
    model = write_pretrained(folder / "SmolLM2-135M-Instruct", "smollm2")
    succeeds("import", model, folder / "runs/examples/smollm2", "--no-verify")
    return folder


@pytest.fixture(autouse=True)
def without_own_code() -> Iterator[None]:
    """Remove the imported kind of attention from this process after a test."""
    kinds = dict(KINDS)
    yield
    KINDS.clear()
    KINDS.update(kinds)
    for name in [each for each in sys.modules if each.startswith("own_kind")]:
        del sys.modules[name]
    os.environ.pop(own_code.IMPORTS, None)


def succeeds(*words: object) -> str:
    """Run a command in this process, check that it succeeds, and return its output."""
    status, out, err = run([str(word) for word in words])
    assert status == 0, f"{words}: {status} {err}"
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_planned(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    found = json.loads(succeeds("plan", f"examples/{name}", "--json"))
    stages = found if isinstance(found, list) else [found]
    assert all(json.dumps(stage).count('"total"') for stage in stages)


def test_the_readme_lists_every_file():
    text = (EXAMPLES / "README.md").read_text()
    assert [each.name for each in EXAMPLES.iterdir() if f"({each.name}" not in text] == [
        "README.md"
    ]


def test_the_smallest_recipe_trains(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    (folder / "texts").mkdir()
    for number in range(60):
        (folder / f"texts/{number}.txt").write_text(f"{number} and {number} are many. " * 20)
    succeeds("prepare", "texts", "--output", "runs/examples/texts", "--tokenizer", "bytes")
    less = ["training.steps=3", "optimizer.schedule.warmup_steps=1", "training.seq_length=64"]
    succeeds("train", "examples/minimal.yaml", *less, "training.eval_batches=1")
    losses = [row["train/loss"] for row in read_metrics(Path("runs/examples/minimal"))
              if "train/loss" in row]  # fmt: skip
    assert len(losses) == 1 and losses[0] < 6


def test_a_job_of_the_cluster_can_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    file = ["--nodes", "2", "--cluster", "examples/slurm_cluster.yaml", "--dry-run"]
    script = succeeds("launch", "examples/minimal.yaml", *file)
    assert "#SBATCH --partition=gpu" in script and "--mail-type=FAIL" in script


def test_the_kernels_run_alone(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(EXAMPLES / "kernels.py"))
    assert re.fullmatch(r"V1 \(2, 128, 4, 64\), V2 \(2, 128, 4, 32\), gradient \d+\.\d+\n",
                        capsys.readouterr().out)  # fmt: skip


def test_the_speedrun_gives_an_answer_on_two_ranks(folder: Path):
    """Stop the script at less than a thousandth of the size, and run it again to the end.

    With vLLM, the end is a server, whose text must be the one that transformers wrote.
    """
    for name, python in (("diffmegatron", forks.python()), ("python", sys.executable)):
        module = "-m diffmegatron" if name == "diffmegatron" else ""
        write_program(folder / name, f'exec {python} {module} "$@"')
    lines = [json.dumps({"text": f"Item {n} is beside item {n + 1}. " * 30}) for n in range(300)]
    (folder / "speed").mkdir()
    (folder / "speed/a.jsonl").write_text("\n".join(lines[:-20]))
    (folder / "held_out.jsonl").write_text("\n".join(lines[-20:]))
    # vLLM's attention on a CPU accepts heads of 32 channels and more.
    small = [
        *("model.num_layers=2", "model.hidden_size=64", "model.ffn_hidden_size=96"),
        *("model.attention.head_dim=32", "model.vocab_size=400", "training.precision=fp32"),
        *("training.tokens=16384", "training.seq_length=256", "training.global_batch_size=4"),
        *("training.micro_batch_size=2", "optimizer.schedule.warmup_steps=1"),
        *("data.validation_fraction=0.1", "training.eval_batches=1", "parallel.tensor=1"),
        *("checkpoint.interval=2", "optimizer.lr=0.01"),
    ]
    command = ["examples/speedrun/speedrun.sh", "speed", "held_out.jsonl", *small]
    sizes = {"RANKS": "2", "TOKENS": "300", "WORKERS": "1", "LENGTH": "256"}
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    # Ctrl-C stops the training of the second model.
    runs = folder / "runs/speedrun"
    with (folder / "log").open("w") as log:
        script = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | sizes | path,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        first = runs / "transformer/checkpoints/step_00000002"
        while script.poll() is None and not first.exists():
            time.sleep(0.02)
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait() == 75, (folder / "log").read_text()[-3000:]
    output = end_of_speedrun(command, folder, sizes | path)
    (resumed,) = re.findall(r"resuming from \S*transformer/checkpoints/step_(\d+)", output)
    assert 2 <= int(resumed) < 16
    report = (runs / "report/report.md").read_text()
    assert re.search(r"\| (better|worse|undecided) \|", report)
    assert (runs / "compared/compare.md").is_file() and (runs / "diff_v2_hf/config.json").is_file()
    assert len(load_stages(runs / "transformer/recipe.yaml")) == 1
    assert "read runs/speedrun/report/report.html" in output


def write_program(file: Path, line: str) -> None:
    file.write_text(f"#!/bin/sh\n{line}\n")
    file.chmod(0o755)


def end_of_speedrun(command: list[str], folder: Path, variables: dict[str, str]) -> str:
    """Run the script to its end, or until its server has answered; return its output."""
    if interpreter() is None:
        result = subprocess.run(
            command, cwd=folder, env=os.environ | variables, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
        return result.stdout
    (home := folder / "serving").mkdir()
    with reserved_ports(1) as (port,):
        options = f"--port {port} --dtype float32 --enforce-eager"
        write_program(folder / "vllm", f'exec {shlex.join(program_command("vllm"))} "$@" {options}')
        with answering(command, port, folder, home, variables) as url:
            (choice,) = complete(
                url,
                model="runs/speedrun/diff_v2_hf",
                prompt="The history of",
                max_tokens=64,
                temperature=0,
            )
    output = (home / "log").read_text()
    assert len(choice["text"]) > 20 and "The history of" + choice["text"] in output
    return output
