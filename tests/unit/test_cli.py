"""The command line: help texts, and errors of one sentence with an exit status."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diffmegatron import __version__
from diffmegatron.attention.kinds.selected_heads import SHARE
from diffmegatron.cli import main
from diffmegatron.commands.dex import select
from diffmegatron.model.accounting.hardware import ACCELERATORS
from diffmegatron.optim.zero import import_deepspeed
from tests.conftest import TINY

COMMANDS = ["plan", "prepare", "train", "export", "evaluate", "doctor"]
COMMANDS += ["launch", "preflight", "status"]


def diffmegatron(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "diffmegatron", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def refused(*arguments: str, status: int = 2, **environment: str) -> str:
    """Run a command that must fail, and return its error, which must be one line."""
    result = diffmegatron(*arguments, **environment)
    assert result.returncode == status, result.stdout + result.stderr
    return the_sentence(result.stderr)


def the_sentence(errors: str) -> str:
    assert "Traceback" not in errors
    (line,) = errors.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def refused_here(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Return a function like :func:`refused` that runs the command in this process.

    Slow imports then happen only once for all tests.
    """

    def run(*arguments: str, status: int = 2, **environment: str) -> str:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["diffmegatron", *arguments])
        # The first import of DeepSpeed may print messages, which ``readouterr`` discards.
        import_deepspeed()
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == status
        return the_sentence(capfd.readouterr().err)

    return run


def test_help_names_every_command():
    text = diffmegatron("--help").stdout
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("group", [[], ["checkpoint"], ["attempt"], ["configs"], ["data"], ["dex"]])
def test_help_does_not_truncate_the_summary_of_a_command(group):
    """Check that no summary ends in dots.

    A sentence that does not fit into a line of 80 columns would end in dots.
    """
    text = diffmegatron(*group, "--help", COLUMNS="80").stdout
    assert "Commands:" in text and "..." not in text.partition("Commands:")[2], text


def test_help_imports_nothing_that_takes_time():
    """Check that no slow module is among the imports, which `-X importtime` lists."""
    command = [sys.executable, "-X", "importtime", "-m", "diffmegatron", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"numpy", "pydantic", "rich", "torch", "yaml"}


def test_dex_select_has_the_default_share_of_the_kind():
    assert inspect.signature(select).parameters["share"].default == SHARE


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("prepare", ["--output", "--tokenizer", "--text-field", "--workers"]),
        ("train", ["CONFIG", "KEY=VALUE"]),
        ("export", ["CHECKPOINT", "OUT", "--no-verify"]),
        ("plan", ["CONFIG", "--json", *(word for gpu in ACCELERATORS for word in gpu.split())]),
    ],
)
def test_help_of_a_command_names_its_arguments(command, words):
    text = diffmegatron(command, "--help").stdout
    assert all(word in text for word in words), text


@pytest.fixture
def recipe(corpus: Path, tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY.format(run_dir=tmp_path / "run", corpus=corpus))
    return str(file)


def test_a_missing_recipe_is_refused():
    assert "cannot read nowhere.yaml" in refused("train", "nowhere.yaml")


def test_the_version():
    assert diffmegatron("--version").stdout == f"diffmegatron {__version__}\n"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("training.stepz=3", "did you mean 'steps'"),
        ("model.attention.kind=diff_v3", "did you mean 'diff_v"),
    ],
)
def test_a_recipe_error_is_reported_before_torch_is_imported(override, hint, recipe):
    """Check the error, and that `-X importtime` does not list torch on standard error."""
    command = [sys.executable, "-X", "importtime", "-m", "diffmegatron", "train", recipe]
    result = subprocess.run(
        [*command, override], capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 2
    assert hint in result.stderr
    assert "| torch" not in result.stderr and "pydantic" in result.stderr


def test_ranks_without_a_launcher_are_refused(recipe, tmp_path):
    assert "WORLD_SIZE but not RANK" in refused("train", recipe, WORLD_SIZE="2")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_JOB_END_TIME"])
def test_an_invalid_environment_variable_is_refused(name, recipe, tmp_path):
    assert f"the environment sets {name} 'soon'" in refused("train", recipe, **{name: "soon"})
    assert not (tmp_path / "run").exists()


def test_an_unresolvable_master_address_is_refused(recipe, refused_here):
    here = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29517", "LOCAL_RANK": "0"}
    line = refused_here("train", recipe, status=69, **here, MASTER_ADDR="no.such.host.invalid")
    assert "MASTER_ADDR 'no.such.host.invalid', which cannot be resolved" in line


@pytest.mark.parametrize("run_dir", ["/proc/run", "{tmp_path}/file/run"])
def test_a_run_dir_that_cannot_be_written_is_refused(run_dir, recipe, tmp_path, refused_here):
    (tmp_path / "file").write_text("")
    line = refused_here("train", recipe, "run_dir=" + run_dir.format(tmp_path=tmp_path))
    assert "cannot write in run_dir" in line


def test_a_missing_corpus_is_refused(recipe, tmp_path, refused_here):
    line = refused_here("train", recipe, f"data.sources=[{{path: {tmp_path}/nothing}}]")
    assert f"{tmp_path}/nothing" in line
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(recipe, tmp_path, refused_here):
    line = refused_here("train", recipe, "model.vocab_size=256")
    assert "uses 257 ids, but model.vocab_size less model.vocab_padding is 256; raise" in line
    assert not (tmp_path / "run").exists()


def test_ranks_that_do_not_fill_the_layout_are_refused(recipe, refused_here):
    assert "1 rank does not fill parallel.tensor 2" in refused_here(
        "train", recipe, "parallel.tensor=2"
    )


def test_plan_refuses_search_together_with_gpus(recipe):
    assert "drop --gpus 4" in refused("plan", recipe, "--search", "8", "--gpus", "4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpus", "0"], "error: 0 ranks cannot be started; give 1 to 1048576"),
        (["--gpus", "-1"], "error: -1 ranks cannot be started"),
        (["--gpus", 4_000 * "9"], "ranks cannot be started"),
        (["--gpus", "0", "--rehearse"], "error: 0 ranks cannot be started"),
        (["--search", "0"], "error: 0 ranks cannot be started"),
        (["--hardware", 4_000 * "x"], "is unknown; give one of H100 PCIe"),
    ],
)
def test_plan_refuses_impossible_rank_counts_and_unknown_hardware(options, said, recipe):
    line = refused("plan", recipe, *options)
    assert said in line
    assert len(line) < 500


def test_an_incompatible_stage_is_refused_before_training(recipe, tmp_path):
    stages = "stages: [{name: a}, {name: b, model: {num_layers: 4}}]"
    Path(recipe).write_text(f"{Path(recipe).read_text()}\n{stages}")
    for command in ("plan", "train"):
        assert "stage 'b' has 4; a run that starts with another's" in refused(command, recipe)
    assert not (tmp_path / "run").exists()


def test_a_stage_that_does_not_fit_the_ranks_is_refused_before_training(
    recipe, tmp_path, refused_here
):
    stages = "stages: [{name: a}, {name: b, parallel: {tensor: 2}}]"
    Path(recipe).write_text(f"{Path(recipe).read_text()}\n{stages}")
    assert "1 rank does not fill parallel.tensor 2" in refused_here("train", recipe)
    assert not (tmp_path / "run").exists()


def test_plan_refuses_an_unknown_attention_backend(recipe):
    assert "flash_4call" in refused("plan", recipe, "training.attention_backend=tritn")


def test_export_refuses_a_path_without_a_checkpoint(tmp_path):
    line = refused("export", str(tmp_path / "step_1"), str(tmp_path / "out"))
    assert "is not a checkpoint" in line
    assert not (tmp_path / "out").exists()


def test_an_export_error_lists_the_existing_checkpoints(tmp_path):
    (tmp_path / "checkpoints" / "step_00000010").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000020").mkdir()
    (tmp_path / "file").write_text("")
    there = "checkpoints has step_00000010, step_00000020"
    line = refused("export", str(tmp_path / "checkpoints/step_00000030"), str(tmp_path / "out"))
    assert there in line and "does not exist" in line
    result = diffmegatron("export", str(tmp_path), str(tmp_path / "out"))
    *passed_over, line = result.stderr.splitlines()
    assert there in line and "has no manifest" in line
    assert len(passed_over) == 2 and all("step_000000" in each for each in passed_over)
    assert "it is a file" in refused("export", str(tmp_path / "file"), str(tmp_path / "out"))


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    line = refused(
        "prepare", str(tmp_path / "empty"), "--output", str(tmp_path / "c"), "--tokenizer", "bytes"
    )
    assert "empty" in line
    assert not (tmp_path / "c.bin").exists()


def test_file_names_that_are_not_utf_8_can_be_printed(tmp_path):
    source = tmp_path / os.fsdecode(b"in\xff.txt")
    source.write_text("text")
    prefix = tmp_path / os.fsdecode(b"out\xff")
    arguments = ("prepare", str(source), "--output", str(prefix), "--tokenizer", "bytes")
    for _ in "ab":
        result = diffmegatron(*arguments, PYTHONIOENCODING="utf-8:strict")
        assert result.returncode == 0, result.stderr
        assert "1 documents" in result.stdout
