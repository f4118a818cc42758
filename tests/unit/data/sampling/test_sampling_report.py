"""Reports on the lengths of documents and the mixture of sources."""

import json
from pathlib import Path

import pytest

from diffmegatron.config.data_config import DataConfig
from diffmegatron.data.prepare.prepare import prepare
from diffmegatron.data.sampling.samples import Samples, open_samples
from diffmegatron.data.sampling.sampling_report import length_table, mixture_table, plot_lengths


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
