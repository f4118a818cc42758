"""Tests that run the benchmarks on sizes that are too small for meaningful measurements."""

import json
import os
import shutil
import subprocess
import sys
from unittest import mock

import pytest

from diffmegatron.cli import app
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.errors import UserError
from tests.paths import ROOT
from tests.pretrained import write_pretrained
from tools.benchmarks import (
    attention,
    compare_dex,
    data,
    evaluation,
    kernel_resources,
    startup,
    startup_phases,
    study_text,
)
from tools.benchmarks.__main__ import main
from tools.benchmarks.command_line import parse
from tools.benchmarks.data import in_process
from tools.benchmarks.registry import BENCHMARKS


def run(name: str, *arguments: object) -> None:
    with mock.patch.dict(os.environ):
        assert main([name, *map(str, arguments)]) == 0


def test_all_are_registered_and_listed(capsys):
    modules = (ROOT / "tools/benchmarks").glob("[!_]*.py")
    assert {path.stem for path in modules if "\ndef main(" in path.read_text()} == {*BENCHMARKS}
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == [*BENCHMARKS]


HELP_OF_ALL = """
import contextlib, io, sys
from tools.benchmarks.__main__ import main
from tools.benchmarks.registry import BENCHMARKS

for name in BENCHMARKS:
    out = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(out):
        main([name, "--help"])
    assert f"usage: python -m tools.benchmarks {name} " in out.getvalue(), name
    assert f"benchmarks.{name}" not in sys.modules and "torch" not in sys.modules, name
"""


def test_help_does_not_import_torch():
    subprocess.run([sys.executable, "-c", HELP_OF_ALL], check=True, cwd=ROOT)


def test_choices_of_the_command_lines_exist():
    words = ["model", "--data-dir=sets", "--data=text", "--haystack=books"]
    assert parse("evaluation", words).parts == [*evaluation.PARTS]
    arguments = parse("kernel_resources", [])
    assert arguments.kernels == [*kernel_resources.KERNELS]
    assert all(
        parse("kernel_resources", ["--capability", str(each)]) for each in kernel_resources.COUNTED
    )
    for source in study_text.SOURCES:
        assert parse("study_text", ["packages", "out", "--only", source]).only == source


def test_an_unregistered_benchmark_is_an_error(capsys):
    assert main(["speed"]) == 2
    assert "'speed' is not a benchmark; give one of attention, " in capsys.readouterr().err


def test_an_unknown_tokenizer_is_an_error(tmp_path, capsys):
    with mock.patch.dict(os.environ):
        assert main(["data", "tokenise", f"--scratch={tmp_path}", "--tokenizer=none"]) == 2
    assert capsys.readouterr().err.startswith("error: tokenizer 'none' is unknown; give 'bytes'")


def test_checkpoint(tmp_path):
    out = tmp_path / "report.json"
    sizes = ("--layers", 1, "--hidden", 64, "--repeats", 1)
    run("checkpoint", "--scratch", tmp_path / "scratch", "--out", out, *sizes)
    report = json.loads(out.read_text())
    assert report["checkpoint_bytes"] > 12 * report["parameters"]
    assert not (tmp_path / "scratch").exists()


def test_attention(tmp_path):
    run("attention", "--device", "cpu", "--dtype", "float32", "--lengths", 64, 128,
        "--heads", 2, "--head-dim", 16, "--repetitions", 1, "--name", tmp_path / "report",
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["lengths"]) == {"64", "128"}
    for rows in report["lengths"].values():
        assert set(rows) == {"transformer_sdpa", "reference", "blocked", "sdpa_4call"}
        assert all(row["both_s"] > 0 for row in rows.values())
    assert "| 128 | blocked |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").stat().st_size > 1000


def test_attention_is_compared_with_the_fastest_of_the_transformers(tmp_path):
    measured = {"forward_s": 1.0, "backward_s": 2.0, "peak_gib": 0.0, "both_tflops": 1.0}
    measured |= {"share_of_matmul": 0.1, "both_gb_per_s": 1.0}
    seconds = {"transformer_sdpa": 3, "transformer_cudnn": 2, "triton_split": 4}
    rows = {name: {**measured, "both_s": both} for name, both in seconds.items()}
    report = {"settings": "", "machine": {}, "matmul_tflops": 1.0}
    for lengths in ({2048: rows}, {2048: {"triton_split": rows["triton_split"]}}):
        attention.write_table(tmp_path / "table.md", {**report, "lengths": lengths})
        *_, line = (tmp_path / "table.md").read_text().splitlines()
        assert line.split(" | ")[5] == ("2.00" if len(lengths[2048]) > 1 else "nan")


def test_chunks(tmp_path):
    run("chunks", "--device", "cpu", "--dtype", "float32", "--chunk", 64, "--heads", 2,
        "--head-dim", 16, "--repetitions", 1, "--name", tmp_path / "report",
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["seconds"]) == {"own chunk", "earlier chunk"}
    for rows in report["seconds"].values():
        assert set(rows) == {
            f"{backend} {direction}"
            for backend in ("transformer", "blocked", "sdpa_4call")
            for direction in ("forward", "backward")
        }
        assert all(seconds > 0 for seconds in rows.values())


def test_layer_operations(tmp_path):
    sizes = {"hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 128, "attention.head_dim": 16}
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    run("layer_operations", "--attention=diff_v1", f"--name={tmp_path / 'report'}", *overrides,
        "training.seq_length=32",
    )  # fmt: skip
    counted = json.loads((tmp_path / "report.json").read_text())["operations"]
    tokens = 32
    # Widths of the input and output of each projection: QKV, attention output, gate and up, down.
    # A product reads its input and its weight and writes its output, all in bf16 (two bytes).
    weights = [(64, 192), (64, 64), (64, 192), (96, 64)]
    read_and_written = sum(2 * (tokens * (i + o) + i * o) for i, o in weights)
    for name, rows in counted.items():
        products = [row for row in rows if row["part"] == "projections"]
        assert [(row["pass"], row["operation"], row["count"]) for row in products] == [
            ("forward", "aten::mm", 4),
            ("backward", "aten::mm", 8),
        ]
        assert [row["bytes"] for row in products] == [read_and_written, 2 * read_and_written]
        loss = [row for row in rows if row["operation"] == "cross_entropy"]
        if name.endswith("own"):
            assert not loss
            continue
        assert [(row["pass"], row["count"]) for row in loss] == [("forward", 1), ("backward", 1)]
        # The forward pass reads the logits and writes a loss per token. The backward pass reads the
        # logits and a gradient per token, and overwrites the logits. A value has two bytes.
        assert [row["bytes"] for row in loss] == [2 * 32 * 128 + 64, 2 * 2 * 32 * 128 + 64]
    between = {
        name: {row["operation"]: row["count"] for row in rows if row["pass"] == "forward"
               and row["part"].startswith("between the attention")}
        for name, rows in counted.items()
    }  # fmt: skip
    # RoPE needs no copy of queries and keys. V1 makes one copy of its values.
    assert "aten::cat" not in between["diff_v1"]
    assert between["diff_v1"]["aten::clone"] == 1
    assert not {"aten::cat", "aten::clone"} & {*between["Transformer"]}


def test_layer(tmp_path):
    run("layer", "--small", "--layers", 1, 2, "--repetitions", 1,
        "--attention", "diff_v1", "--attention", "diff_v2",
        "--attention", "grouped,signal_per_noise=2",
        "--name", tmp_path / "report", "--", "model.hidden_size=64", "model.attention.head_dim=16",
        "model.ffn_hidden_size=64", "training.seq_length=64",
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    measured = report["measured"]["2"]
    assert set(measured) == {"diff_v1", "diff_v2", "grouped,signal_per_noise=2", "Transformer"}
    assert all(values["tokens_per_second"] > 0 for values in measured.values())
    assert report["shape"]["attention"]["diff_v1"]["num_heads"] == 2
    assert report["shape"]["attention"]["Transformer"]["num_heads"] == 4
    assert "| 2 | diff_v2 |" in (tmp_path / "report.md").read_text()


def test_kernel_resources(tmp_path):
    pytest.importorskip("triton", reason="the kernels are written in Triton")
    run(
        "kernel_resources", "--kernels", "dq", "--head-dim", 64, "--rows", 128, "--keys", 64,
        "--warps", 8, "--stages", 2, "--licm", 0, "--name", tmp_path / "report",
    )  # fmt: skip
    (row,) = json.loads((tmp_path / "report.json").read_text())["kernels"]["dq"]
    assert row["work"] == 1
    assert row["shared_bytes"] > 64 * 1024
    assert [row[name] for name in ("M", "N", "licm")] == [128, 64, False]


def test_data(tmp_path, monkeypatch):
    # Measure in this process, because the benchmark would start a process for every measurement.
    monkeypatch.setattr(data, "in_process", lambda function, *arguments: function(*arguments))
    (tmp_path / "out").mkdir()
    for part, *sizes in (
        ["loader", "--tokens=1e6", "--seq-lengths=1024", "--repeats=1"],
        ["startup", "--tokens=1e6", "--repeats=1"],
        ["upsampling", "--tokens=1e6"],
        ["parts", "--tokenizer=bytes", "--megabytes=1", "--repeats=1", "--processes=2"],
    ):
        scratch, name = tmp_path / "scratch", tmp_path / "out" / part
        run("data", part, *sizes, f"--scratch={scratch}", f"--name={name}")
    reports = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "out").iterdir()}
    assert set(reports) == {"loader", "startup", "upsampling", "parts"}
    loaders = {row.pop("loader"): row for row in reports["loader"]["results"]}
    assert set(loaders) == {"our_loader", "megatron_loader"}
    assert all(figure > 0 for row in loaders.values() for figure in row.values())
    (opened,) = reports["startup"]["results"]
    assert (opened["documents"], opened["tokens"]) == (250, 10**6)
    assert reports["upsampling"]["per_source"]["largest_deviation"] < 0.001
    (row,) = reports["parts"]["results"]
    assert row.pop("processes") == 2
    assert row.keys() == {"MB_per_second", "merge_seconds", "merge_MB_of_tokens_per_second"}
    assert all(figure > 0 for figure in row.values())
    assert not any((tmp_path / "scratch").iterdir())


def test_data_tokenise(tmp_path):
    sizes = ("--tokenizer", "bytes", "--megabytes", 1, "--repeats", 1)
    out = ("--scratch", tmp_path, "--name", tmp_path / "report")
    run("data", "tokenise", *sizes, *out)
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["workers"] for row in report["sizes"]] == [1, os.cpu_count()]
    assert report["one_worker"]["median_ratio"] > 0


def test_an_error_in_a_measured_process_reaches_the_user():
    with pytest.raises(UserError, match="'none' is unknown; give 'bytes'"):
        in_process(load_tokenizer, "none")


def test_compare_dex(tmp_path, monkeypatch):
    """Check that all parts run on a tiny model, and that a repeated part keeps the report."""
    commands = []

    def in_this_process(*arguments: object) -> None:
        commands.append(arguments[0])
        app([str(each) for each in arguments], standalone_mode=False)

    monkeypatch.setattr(compare_dex, "diffmegatron", in_this_process)
    monkeypatch.setattr(compare_dex, "LENGTH", 64)
    monkeypatch.setattr(
        compare_dex, "ARMS", pick(compare_dex.ARMS, "control", "dex-entropy", "full")
    )
    monkeypatch.setattr(compare_dex, "STARTS", pick(compare_dex.STARTS, "control", "zero-30-half"))
    model = write_pretrained(tmp_path / "model", "llama 2")
    texts = tmp_path / "texts.jsonl"
    lines = ({"text": f"document {n} says that {n} and 1 are {n + 1}"} for n in range(60))
    texts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out" / "report.json"
    given = [model, texts, f"--work={tmp_path / 'work'}", f"--out={out}", "--seeds=2"]

    def compare(part: str) -> dict:
        run("compare_dex", *given, "--part", part)
        return json.loads(out.read_text())

    given += ["--steps=2", "--start-steps=2", "--timed-steps=2"]
    report = compare("all")
    assert commands.count("train") == 3 + 2 * 2 + 3 * 2
    losses = {name: arm["runs"][0]["loss_before"] for name, arm in report["arms"]["arms"].items()}
    assert len(set(losses.values())) == 1, "all arms must begin with the loss of the given model"
    assert report["inference"].keys() == {"prefill", "decoding", "training"}
    written = out.with_suffix(".md").read_text()
    starts = report["starts"]["arms"]
    gains = [
        before["loss_after"] - after["loss_after"]
        for before, after in zip(*(arm["runs"] for arm in starts.values()), strict=True)
    ]
    assert f"{sum(gains) / 2:+.4f} ±" in written
    speeds = [run["tokens_per_second"] for run in report["throughput"]["arms"]["control"]["runs"]]
    full = [run["tokens_per_second"] for run in report["throughput"]["arms"]["full"]["runs"]]
    assert f"{min(map(float.__truediv__, speeds, full)):.2f} |" in written
    assert out.with_suffix(".png").stat().st_size > 1000
    assert compare("starts") == report


def pick(arms: dict, *names: str) -> dict:
    return {name: arms[name] for name in names}


def test_cpu_step(tmp_path):
    out = tmp_path / "report.json"
    run("cpu_step", "--lengths", 16, "--seconds", 0.01, "--vocabulary", 64, "--out", out)
    (row,) = json.loads(out.read_text())["lengths"]
    assert set(row["ratio"]) == {"plain", "plain, fused AdamW"}
    assert row["tokens"] == 16 and row["turns"] >= 1


def test_coordinates(tmp_path):
    """Check that the logits of wider networks move further without muP, and hardly with it."""
    out = tmp_path / "coordinates.json"
    run("coordinates", "--widths", 32, 128, "--steps", 4, "--seeds", 1, "--out", out)
    changes = json.loads(out.read_text())["changes"]
    growth = {
        scheme: wide / base
        for scheme, found in changes.items()
        for ((base, wide),) in (found["logits"],)
    }
    assert growth["scaled"] > 2 > growth["mup"]
    assert out.with_suffix(".png").stat().st_size > 1000


def test_startup(tmp_path, corpus, capsys, monkeypatch):
    """Check that the total in the report is the sum of the phases.

    The phases are timed in this process, which has imported most modules already.
    """
    shutil.copytree(corpus.parent, tmp_path / "start")
    for file in (tmp_path / "start").glob(f"{corpus.name}.*"):
        file.rename(file.with_name(f"corpus{file.suffix}"))
    startup_phases.start("train", str(tmp_path / "start"))
    phases = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [*phases][-2:] == ["network, optimizer, held-out loss", "first step"]
    assert phases["first step"] > 0
    monkeypatch.setattr(startup, "time_phases", lambda *_: phases)
    out = tmp_path / "report.json"
    run("startup", "--turns", 1, "--out", out)
    report = json.loads(out.read_text())
    assert report["ratio"] == 1 and report["help_cpu_seconds"] > 0
    total = report["cpu_seconds"]["train"]["total"]
    assert total == pytest.approx(sum(phases.values()), abs=0.01)
