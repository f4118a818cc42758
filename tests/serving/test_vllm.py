"""Tests that vLLM serves exports with the numbers of ``transformers``."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from diffmegatron.config.schema import Recipe
from diffmegatron.data.tokenizers import load_tokenizer
from diffmegatron.evaluation.evaluate_settings import Computing
from diffmegatron.hf.export_checkpoint import serving_form
from diffmegatron.hf.write_export import write_export
from tests.pretrained import random_weights
from tests.serving import PYTHON, command, environment, interpreter
from tests.serving.answers import LENGTHS, NAMES, NEW_TOKENS, answers, prompts, requests
from tests.serving.servers import complete, page_command, serving

pytestmark = pytest.mark.skipif(
    interpreter() is None,
    reason=f"{PYTHON} names no interpreter with vLLM; 'make vllm' makes .vllm/bin/python",
)


V2 = {"kind": "diff_v2", "head_dim": 32}
V1 = {"kind": "diff_v1", "head_dim": 32}
GROUPED = {"kind": "grouped", "num_kv_heads": 2, "head_dim": 32}
# vLLM's attention on a CPU accepts heads of 32 channels and more. Each layer of the pattern has 8
# query heads and 4 key-value heads in its attention call.
KINDS: dict[str, Any] = {
    "pattern": [
        V2 | {"num_heads": 4, "layers": 1, "output_gate": "elementwise", "window": 24},
        V1 | {"num_heads": 2, "num_kv_heads": 1, "layers": 2},
        {"kind": "softmax", "num_heads": 8, "num_kv_heads": 4, "output_gate": "elementwise"},
    ],
    "diff_v2": V2 | {"signal_per_noise": 4, "num_heads": 8, "num_kv_heads": 2},
    "diff_v2_r1": [
        V2 | {"num_heads": 4, "num_kv_heads": 2, "window": 24, "layers": 1},
        V2 | {"num_heads": 4, "num_kv_heads": 2, "layers": 2},
    ],
    "diff_v1": V1 | {"num_heads": 4, "num_kv_heads": 2},
    "grouped": GROUPED | {"signal_per_noise": 3, "num_heads": 6},
    "grouped_r1": GROUPED | {"signal_per_noise": 1, "num_heads": 4, "qk_norm": True, "window": 24},
    "dex": {
        "kind": "dex",
        "num_heads": 8,
        "num_kv_heads": 2,
        "selected_heads": [[0, 2], [1]],
        "annealing_steps": None,
        "window": 24,
    },
}


def make_recipe(attention: Any) -> Recipe:
    layers = len(attention) if isinstance(attention, list) else 2
    return Recipe.model_validate(
        {
            "run_dir": "run",
            "model": {
                "num_layers": layers,
                "hidden_size": 256,
                "ffn_hidden_size": 96,
                "vocab_size": 264,
                "rope_theta": 700.0,
                "attention": attention,
            },
            "data": {"tokenizer": "bytes", "sources": [{"path": "corpus"}]},
            "training": {"seq_length": 256, "global_batch_size": 2, "steps": 4},
            "optimizer": {"lr": 1e-3},
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write exports and data, run vLLM on them, and return the folder.

    In the exports for transformers, DIFF V1 is DiffLlama, the class of that library.
    """
    folder, tokenizer = tmp_path_factory.mktemp("served"), load_tokenizer("bytes")
    for name, attention in KINDS.items():
        recipe = make_recipe(attention)
        weights = random_weights(recipe.model)
        # A logit of 0 is never the largest, so no text ends early.
        weights["output_layer.weight"][tokenizer.end_of_document] = 0.0
        for engine, form in (("transformers", recipe), ("vllm", serving_form(recipe))):
            write_export(weights, form, tokenizer, folder / engine / name, torch.float32)
    (folder / "text.txt").write_text("def cube(x):\n    return x * x * x\n\n" * 16)
    rows = [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in range(3)]
    for split in ("train", "test"):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"gsm8k_{split}.jsonl").write_text(lines)
    run = subprocess.run(
        command("tests.serving.answers", folder),
        env=environment(folder / "home"),
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert run.returncode == 0, run.stderr[-5000:]
    return folder


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    """Return the answers of transformers and of vLLM."""
    return answers(folder, Computing()), json.loads((folder / "vllm.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_served_answers_are_those_of_transformers(name: str, both: Any) -> None:
    expected, found = (each[name] for each in both)
    assert len(expected) == len(found) == len(requests()) + 2
    for one, other in zip(expected, found, strict=True):
        if isinstance(one[0], int):
            assert other == one
            continue
        for (losses, likeliest), (served, also) in zip(one, other, strict=True):
            assert torch.allclose(torch.tensor(served), torch.tensor(losses), rtol=1e-4, atol=1e-5)
            assert also == likeliest
    texts = [one for one in expected if len(one) == NEW_TOKENS]
    assert len(texts) == 8 and all(len({*text}) > 10 for text in texts)


def close(value: Any) -> Any:
    """Return a value of a record with which numbers compare equal within 1e-4 relative."""
    if isinstance(value, dict):
        # The checksum depends on the last digits.
        return {key: close(each) for key, each in value.items() if key != "crc32"}
    if isinstance(value, list):
        return [close(each) for each in value]
    return pytest.approx(value, rel=1e-4) if isinstance(value, float) else value


def records(file: Path) -> list[dict[str, Any]]:
    """Return the records of a results file, without its header."""
    lines = file.read_text().splitlines()[1:]
    return [{k: v for k, v in json.loads(line).items() if k != "crc32"} for line in lines]


@pytest.mark.parametrize("suite", ["loss", "math"])
def test_an_evaluation_has_the_same_records_in_both_engines(
    suite: str, folder: Path, both: Any
) -> None:
    for name in NAMES:
        expected, found = (
            records(folder / f"{engine}.out" / suite / f"{name}.jsonl")
            for engine in ("transformers", "vllm")
        )
        assert expected and found == close(expected)


def test_the_pages_vllm_server_shards_diff_v2_over_two_ranks(folder: Path, both: Any) -> None:
    command = page_command("vllm", "--tensor-parallel-size")
    with serving(command, export := folder / "vllm/diff_v2", folder / "vllm serve") as url:
        choices = complete(
            url,
            model=str(export),
            prompt=prompts(),
            max_tokens=NEW_TOKENS,
            temperature=0,
            prompt_logprobs=0,
            return_token_ids=True,
        )
    expected = both[0]["diff_v2"]
    texts = expected[len(LENGTHS) - 1 :][: len(LENGTHS)]
    assert [each["token_ids"] for each in choices] == texts
    # The first prompt has one token, which has no likelihood.
    for choice, ((losses, _), *_) in zip(choices[1:], expected[: len(LENGTHS) - 1], strict=True):
        found = [-each["logprob"] for (each,) in map(dict.values, choice["prompt_logprobs"][1:])]
        assert found == pytest.approx(losses, rel=1e-4, abs=1e-5)


def test_the_pages_transformers_server_writes_the_same_text(folder: Path, both: Any) -> None:
    with serving(
        page_command("transformers", "serve"),
        export := folder / "transformers/diff_v1",
        folder / "transformers serve",
    ) as url:
        (choice,) = complete(url, model=str(export), prompt="AB", max_tokens=5, temperature=0)
    text = load_tokenizer("bytes").decode(both[0]["diff_v1"][-1])
    assert choice["text"] == text and len(text) > 1
