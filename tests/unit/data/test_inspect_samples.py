"""Tests of ``diffmegatron data inspect``: decoded samples, tables, ``--stage`` and errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diffmegatron.cli import app
from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.inspect_samples import length_table, mixture_table, plot_lengths
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.sampling.samples import Samples, open_samples
from diffmegatron.errors import UserError
from tests.paths import CONFIGS

QUICKSTART = CONFIGS / "quickstart.yaml"


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


def inspect(*arguments: str, recipe: Path = QUICKSTART) -> str:
    command = ["data", "inspect", str(recipe), *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_samples_are_decoded(sources: list[dict[str, object]]) -> None:
    output = inspect(f"data.sources={json.dumps(sources)}", "--max-tokens", "150")
    assert "wwwwwwwww<|endoftext|>\n┃ " in output
    assert "mixture over 10 batches from step 0 on" in output
    assert "75.000%" in output


def test_tokens_without_loss_are_bracketed(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": chat}) + "\n") * 40)
    prepare(
        [tmp_path / "chat.jsonl"], tmp_path / "chat", "bytes", layout="chat", show_progress=False
    )
    sources = json.dumps([{"path": str(tmp_path / "chat")}])
    output = inspect(
        f"data.sources={sources}",
        "data.packing=best_fit",
    )
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert f"\n⟦{prompt}⟧Hello<|im_end|><|endoftext|>" in output
    output = inspect(
        f"data.sources={sources}", "data.packing=best_fit", "--samples=1", "--max-tokens=999"
    )
    sample = output.partition("mixture over")[0].rstrip()
    shown = sample.count("Hello")
    tokens = (
        open_samples(DataConfig(tokenizer="bytes", sources=json.loads(sources)), 256, 1, "train")
        .sources.popitem()[1]
        .corpus.lengths[0]
    )
    left = 257 - shown * int(tokens)  # A sequence of 256 tokens has a label after its last token.
    assert f", {shown} documents, " in sample
    assert sample.endswith(f"\n┃ ({left} tokens of padding)") and left > 0
    assert sample.count("<|endoftext|>") == shown


def test_inspect_writes_the_lengths_as_png(
    sources: list[dict[str, object]], tmp_path: Path
) -> None:
    picture = tmp_path / "lengths.png"
    output = inspect(f"data.sources={json.dumps(sources)}", "--samples=0", f"--lengths={picture}")
    assert f"wrote {picture}" in output and "sample 0" not in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_stage_option_selects_a_stage(sources: list[dict[str, object]], tmp_path: Path) -> None:
    recipe = tmp_path / "stages.yaml"
    recipe.write_text(
        f"extends: {QUICKSTART}\nstages:\n  - name: first\n  - name: second\n"
        f"    data: {{sources: {json.dumps(sources[1:])}}}\n"
    )
    first = f"data.sources={json.dumps(sources[:1])}"
    output = inspect("--stage", "second", "--max-tokens", "150", recipe=recipe)
    assert "cccccccc" in output and "wwwwww" not in output
    with pytest.raises(UserError, match="has the stages first, second; give one"):
        inspect(first, recipe=recipe)
    with pytest.raises(UserError, match="has no stages; leave out --stage first"):
        inspect(first, "--stage", "first")


def test_a_prepared_corpus_in_place_of_a_recipe_is_refused(
    sources: list[dict[str, object]], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"is a prepared corpus; give a recipe with it"):
        inspect(recipe=tmp_path / "web")


def test_a_missing_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        inspect(f"data.sources=[{{path: {tmp_path / 'none'}}}]")


# Tables and the picture


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
    # The texts have 9 and 99 tokens: 810 of 1,800 are in short ones.
    assert rows["web", "8"] == ["90", "0", "45.00%", "0.00%"]
    assert rows["web", "64"] == ["10", "10", "55.00%", "100.00%"]
    assert rows["code", "64"] == ["20", "20", "100.00%", "100.00%"]


def test_length_table_counts_tokens_as_upsampling_does(tmp_path: Path) -> None:
    """Check documents whose end-of-document token would lift them over ``long_tokens``."""
    (tmp_path / "x.jsonl").write_text("".join(f'{{"text": "{"x" * n}"}}\n' for n in (63, 64, 65)))
    prepare([tmp_path / "x.jsonl"], tmp_path / "x", "bytes", show_progress=False)
    config = DataConfig(
        tokenizer="bytes",
        sources=[{"path": str(tmp_path / "x")}],
        upsampling={"mode": "per_source", "long_tokens": 64, "keep_short": 0.0},
        validation_fraction=0,
    )
    table = length_table(open_samples(config, 32, 1, "train"))
    rows = [line.split()[1:4] for line in table.splitlines()[2:]]
    assert rows == [["32", "1", "0"], ["64", "2", "2"]]


def test_mixture_table_counts_what_was_drawn(samples: Samples) -> None:
    rows = [line.split()[1:] for line in mixture_table(samples, 10, 40).splitlines()[1:]]
    assert rows == [["75.000%", "75.000%"], ["25.000%", "25.000%"]]


def test_length_picture(samples: Samples, tmp_path: Path) -> None:
    plot_lengths(samples, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
