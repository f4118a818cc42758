"""The reports on lengths and mixtures, and the tool that prints decoded samples."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from typer import Typer
from typer.testing import CliRunner

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.sampling.samples import Samples, open_samples
from diffmegatron.data.sampling.sampling_report import length_table, mixture_table, plot_lengths
from tests.paths import ROOT


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, object]]:
    for name, texts in (("web", ["w" * 9] * 90 + ["v" * 99] * 10), ("code", ["c" * 99] * 20)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        prepare([path], tmp_path / name, "bytes", show_progress=False)
    return [
        {"path": str(tmp_path / "web"), "weight": 3},
        {"path": str(tmp_path / "code"), "weight": 1},
    ]


@pytest.fixture
def samples(sources: list[dict[str, object]]) -> Samples:
    upsampling = {"mode": "per_source", "long_tokens": 50, "keep_short": 0.0}
    config = DataConfig(
        tokenizer="bytes", sources=sources, upsampling=upsampling, validation_fraction=0
    )
    return open_samples(config, 32, 1, "train")


def test_length_table_shows_what_upsampling_does(samples: Samples) -> None:
    rows = {
        tuple(line.split()[:2]): line.split()[2:] for line in length_table(samples).splitlines()
    }
    assert rows["web", "8"] == ["90", "0", "47.37%", "0.00%"]
    assert rows["web", "64"] == ["10", "10", "52.63%", "100.00%"]
    assert rows["code", "64"] == ["20", "20", "100.00%", "100.00%"]


def test_mixture_table_counts_what_was_drawn(samples: Samples) -> None:
    rows = [line.split()[1:] for line in mixture_table(samples, 10, 40).splitlines()[1:]]
    assert rows == [["75.000%", "75.000%"], ["25.000%", "25.000%"]]


def test_length_picture(samples: Samples, tmp_path: Path) -> None:
    plot_lengths(samples, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def inspect(*arguments: str, recipe: Path = QUICKSTART) -> tuple[int, str]:
    app = Typer()
    app.command()(load_tool("inspect_batches").main)
    result = CliRunner().invoke(app, [str(recipe), *arguments])
    return result.exit_code, result.output


def test_inspect_batches_decodes_samples(sources: list[dict[str, object]]) -> None:
    code, output = inspect(f"data.sources={json.dumps(sources)}", "--max-tokens", "150")
    assert code == 0
    assert "wwwwwwwww<|endoftext|>\n┃ " in output
    assert "mixture over 10 batches from step 0 on" in output
    assert "75.000%" in output


def test_inspect_batches_of_a_stage(sources: list[dict[str, object]], tmp_path: Path) -> None:
    recipe = tmp_path / "stages.yaml"
    recipe.write_text(
        f"extends: {ROOT}/configs/quickstart.yaml\nstages:\n  - name: first\n  - name: second\n"
        f"    data: {{sources: {json.dumps(sources[1:])}}}\n"
    )
    first = f"data.sources={json.dumps(sources[:1])}"
    code, output = inspect("--stage", "second", "--max-tokens", "150", recipe=recipe)
    assert code == 0 and "cccccccc" in output and "wwwwww" not in output
    code, output = inspect(first, recipe=recipe)
    assert code == 2 and "has the stages first, second; give one" in " ".join(output.split())
    code, output = inspect(first, "--stage", "first")
    assert code == 2 and "has no stages; leave out --stage first" in " ".join(output.split())


def test_inspect_batches_says_what_is_wrong(tmp_path: Path) -> None:
    code, output = inspect(f"data.sources=[{{path: {tmp_path / 'none'}}}]")
    assert code == 2
    assert "does not exist" in " ".join(output.split())
