"""Rehearsals of `make gpu-report`: on the CPU with a kill in the middle, and on a simulated GPU."""

import json
import shutil
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import forks
from tests.paths import ROOT
from tests.simulated_cuda.library import UnavailableError
from tests.simulated_cuda.simulate import Case, SimulationError, try_simulate
from tools.benchmarks import gpu_report
from tools.benchmarks.__main__ import main
from tools.benchmarks.gpu_report import PAGE, REHEARSAL, STEPS, fill_in
from tools.benchmarks.gpu_report_page import Finding, Result, summarize

TRAINING = {step.name: step for step in STEPS if step.name.startswith("train_")}


def read(folder: Path) -> dict[str, dict]:
    """Return the rows of a report by step, and check that the page and the archive have them."""
    rows = {row["step"]: row for row in json.loads((folder / "results.json").read_text())["steps"]}
    page = (folder / "gpu_report.md").read_text()
    with tarfile.open(folder / "gpu_report.tar.gz") as archive:
        names = archive.getnames()
    for name, row in rows.items():
        assert f"| {name} | " in page and row["sentence"] in page
        assert f"gpu_report/{name}.log" in names
    assert not [name for name in names if "checkpoints" in name or "/hf/" in name]
    return rows


def processes_of(folder: Path) -> list[bytes]:
    """Return the command lines of the processes that name a file in ``folder``."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # The process may end meanwhile.
            found.append(path.read_bytes())
    return [each for each in found if f"{folder}/".encode() in each]


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Return the folder of a whole rehearsal, whose processes are forks."""
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", forks.python())
        assert main(["gpu_report", "--rehearse", f"--out={folder}"]) == 0
    return folder


def test_every_step_of_a_rehearsal_succeeds(rehearsed):
    rows = read(rehearsed)
    assert [*rows] == [step.name for step in STEPS]
    assert {row["status"] for row in rows.values()} == {"done"}
    assert (
        rows["resume"]["is_right"]
        and "of 4 steps are equal to the bit" in rows["resume"]["sentence"]
    )
    assert all(rows[name]["is_right"] for name in TRAINING)
    assert "tests passed, 0 failed" in rows["kernels"]["sentence"]
    assert rows["tune"]["is_right"] and "differential " in rows["tune"]["sentence"]
    assert "softmax" in rows["export"]["sentence"] and "tokens/s" in rows["export"]["sentence"]
    page = (rehearsed / "gpu_report.md").read_text()
    assert page.startswith("# Rehearsal of a GPU report: ") and "open an issue" not in page
    has_gpu = torch.cuda.is_available()
    assert rows["kernels"]["is_tested"] == rows["memory"]["is_tested"] == has_gpu
    not_tested = "nothing" if has_gpu else "kernels, memory"
    judged = f"**Wrong: nothing. Failed: nothing. Not tested: {not_tested}.** Unfinished: nothing."
    assert judged in page


def test_a_killed_report_leaves_the_ended_steps_and_no_process(tmp_path):
    command = [forks.python(), "-m", "tools.benchmarks", "gpu_report", "--rehearse"]
    report = subprocess.Popen([*command, f"--out={tmp_path}"], cwd=ROOT)
    while not (tmp_path / "kernels.log").exists():
        assert report.poll() is None
        time.sleep(0.05)
    report.kill()
    report.wait()
    assert [*read(tmp_path)] == ["doctor"]
    assert "Unfinished: kernels, tune, layer, " in (tmp_path / "gpu_report.md").read_text()
    while processes_of(tmp_path):
        time.sleep(0.05)
    assert "skipped" not in (tmp_path / "kernels.log").read_text(), "the step ran to its end"


def test_a_late_step_ends_and_the_next_one_runs(tmp_path, monkeypatch):
    endless, short = (
        gpu_report.Step(name, 12, [command])
        for name, command in (("prepare", "http.server --bind 127.0.0.1 0"), ("doctor", "this"))
    )
    monkeypatch.setattr(gpu_report, "STEPS", (endless, short, short))
    monkeypatch.setattr(gpu_report, "LEAST", 1)
    assert main(["gpu_report", "--seconds=45", f"--out={tmp_path}"]) == 0
    first, second, _ = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert (first["status"], second["status"]) == ("stopped at its deadline", "done")
    assert not processes_of(tmp_path)
    monkeypatch.setattr(gpu_report, "LEAST", 2)
    assert main(["gpu_report", "--seconds=45", f"--out={tmp_path}"]) == 0
    rows = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert {row["status"] for row in rows} == {"not started"}


def test_a_failed_step_is_named_with_the_last_line_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "STEPS", (gpu_report.Step("tune", 60, ["no_module"]),))
    with pytest.raises(SystemExit, match="1"):
        main(["gpu_report", f"--out={tmp_path}"])
    (row,) = json.loads((tmp_path / "results.json").read_text())["steps"]
    assert row["sentence"].startswith("tune.log ends with: ")
    assert row["sentence"].endswith("No module named no_module")
    page = (tmp_path / PAGE).read_text()
    assert page.startswith("# GPU report: ") and "open an issue" in page
    assert "**Wrong: nothing. Failed: tune. Not tested: nothing.** Unfinished: n" in page


def test_a_report_whose_tests_are_all_skipped_fails_except_in_a_rehearsal(tmp_path, monkeypatch):
    (tmp_path / "kernels.json").write_text('{"collected": 3}\n')
    finding = summarize("kernels", tmp_path)
    assert finding == Finding("0 of 3 tests passed, 0 failed, 0 were skipped", None, False)
    skipped = Result("kernels", "done", 1, **vars(finding))
    assert skipped.decision == "not tested"
    monkeypatch.setattr(gpu_report, "STEPS", STEPS[1:2])
    monkeypatch.setattr(gpu_report, "run_step", lambda *_: skipped)
    out = f"--out={tmp_path / 'report'}"
    with pytest.raises(SystemExit, match="1"):
        main(["gpu_report", out])
    assert main(["gpu_report", "--rehearse", out]) == 0


def test_a_report_without_pytest_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_report, "find_spec", lambda _: None)
    assert main(["gpu_report", f"--out={tmp_path / 'report'}"]) == 2
    assert "run 'make install'" in capsys.readouterr().err and not any(tmp_path.iterdir())


def test_a_folder_with_other_files_is_refused(tmp_path, capsys):
    (tmp_path / "thesis.tex").touch()
    assert main(["gpu_report", f"--out={tmp_path}"]) == 2
    assert "holds other files; give an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert main(["gpu_report", f"--out={tmp_path / 'thesis.tex'}"]) == 2
    assert "is a file; give a folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["gpu_report", f"--out={tmp_path}", "--seconds=0"])


def test_only_the_files_of_an_earlier_report_are_replaced(rehearsed, tmp_path):
    shutil.copytree(rehearsed, tmp_path / "report", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "report" / "thesis.tex").touch()
    gpu_report.clear(tmp_path / "report")
    left = {path.name for path in (tmp_path / "report").iterdir()}
    assert left == {"thesis.tex", "work", PAGE}


@pytest.mark.parametrize(("stopped", "statuses"), [(1, (0, 75, 0)), (None, (0, 0, 0))])
def test_only_the_named_command_may_be_stopped(tmp_path, monkeypatch, stopped, statuses):
    step = gpu_report.Step("doctor", 30, ["a", "b", "c"], stopped)
    for wrong in range(3):
        for codes in (
            statuses,
            tuple(75 - code if n == wrong else code for n, code in enumerate(statuses)),
        ):
            ends = iter(codes)
            monkeypatch.setattr(gpu_report, "run_process", lambda *_, ends=ends: next(ends))
            result = gpu_report.run_step(step, [["a"], ["b"], ["c"]], tmp_path, 30)
            assert (result.status == "done") == (codes == statuses)


def test_another_bit_after_a_resume_is_found(rehearsed, tmp_path):
    """Change the last bit of a loss, and then the checksum of the saved weights."""
    shutil.copytree(rehearsed / "work", tmp_path / "work")
    metrics = tmp_path / "work/resumed/metrics.jsonl"
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = [entry for entry in entries if "train/loss" in entry][-1]
    last["train/loss"] = float(np.nextafter(last["train/loss"], 0))
    metrics.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert summarize("resume", tmp_path) == Finding("the loss of step 4 of 4 differs", False)
    shutil.copy(rehearsed / "work/resumed/metrics.jsonl", metrics)
    (manifest,) = (tmp_path / "work/resumed").glob("checkpoints/step_00000004/manifest.json")
    content = json.loads(manifest.read_text())
    next(each for each in content["files"] if each["name"].startswith("rank_"))["crc32"] ^= 1
    manifest.write_text(json.dumps(content))
    assert "weights or moments differ" in summarize("resume", tmp_path).sentence


def test_a_wrong_backend_is_found(rehearsed, tmp_path):
    """Give the measurements of a rehearsal to a backend whose error exceeds the allowed one."""
    (tmp_path / "cache").mkdir()
    (file,) = (rehearsed / "cache").glob("*.json")
    content = json.loads(file.read_text())
    content["kernels"][0]["candidates"][0] |= {"error": 7.0, "problem": "dk of the last row"}
    (tmp_path / "cache" / file.name).write_text(json.dumps(content))
    finding = summarize("tune", tmp_path)
    assert finding.is_right is False
    assert f"(wrong: {content['kernels'][0]['candidates'][0]['backend']})" in finding.sentence


def test_failed_tests_and_a_rising_loss_are_found(tmp_path):
    """Judge outcomes of a killed pytest, memory that `plan` underestimates, and a rising loss."""
    rows = [
        {"collected": 4},
        {"name": "a.py::test_a", "outcome": "passed", "values": {"planned": 90, "allocated": 100}},
        {"name": "a.py::test_b", "outcome": "failed", "values": {"planned": 60, "allocated": 100}},
    ]
    (tmp_path / "memory.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert summarize("memory", tmp_path) == Finding(
        "1 of 4 tests passed, 1 failed, 0 were skipped; plan's bytes - the allocator's: "
        "-40.0% to -10.0%: test_b",
        False,
    )
    run = tmp_path / "work/diff_v1"
    run.mkdir(parents=True)
    entries = [{"step": step, "train/loss": loss} for step, loss in ((1, 2.0), (2, 2.5))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert summarize("train_diff_v1", tmp_path) == Finding("loss 2.000 to 2.500 at step 2", False)
    (tmp_path / "layer.log").write_text("$ python -m a\nout of | memory\n\n")
    assert summarize("layer", tmp_path) == Finding("layer.log ends with: out of / memory")


@pytest.fixture(scope="module")
def simulated(rehearsed, tmp_path_factory):
    """Run the steps "layer" and "train_...", and `preflight`, on a simulated GPU.

    Returns:
        The folder of the steps, and the results.
    """
    folder = tmp_path_factory.mktemp("simulated")
    shutil.copytree(
        rehearsed / "work", folder / "work", ignore=lambda _, names: {*names} - {*text(names)}
    )
    cases = []
    for step in TRAINING.values():
        ((_, _, _, recipe, *overrides),) = fill_in(step, folder, REHEARSAL)
        run = "tests.simulated_cuda.training:run_training"
        cases.append(Case(recipe, 1, tuple(overrides), run=run))
    report = "tests.simulated_cuda.report"
    cases.append(Case(recipe, 1, (f"run_dir={folder}/work/layer",), run=f"{report}:run_layer"))
    checked = (*overrides, "training.attention_backend=triton", f"run_dir={folder}/work/fit")
    cases.append(Case(recipe, 2, checked, run=f"{report}:run_preflight"))
    try:
        return folder, try_simulate(cases)
    except UnavailableError as error:
        pytest.skip(f"CUDA cannot be simulated: {error}")


def text(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("text.")]


def test_the_steps_run_on_a_simulated_gpu(simulated):
    folder, results = simulated
    for result in results:
        if isinstance(result, SimulationError):
            raise result
    rows = [Result(name, "done", 1, summarize(name, folder).sentence) for name in TRAINING]
    assert all("MFU" in row.sentence and "peak" in row.sentence for row in rows)
    assert "grouped" in summarize("layer", folder).sentence
    assert "simulated" in json.loads((folder / "layer.json").read_text())["machine"]["device"]


def test_preflight_computes_with_the_kernels_of_a_simulated_gpu(simulated):
    *_, result = simulated[1]
    if isinstance(result, SimulationError):
        raise result
    names = ["a matrix product", "softmax attention (triton)", "the loss (triton)"]
    assert [*result.outcome["bits"]] == names
    assert result.outcome["device"] == "simulated NVIDIA H100 80GB HBM3"
