"""Tests of ``--engine vllm`` with a stand-in; tests/serving runs vLLM itself."""

import json
import sys
from pathlib import Path

import pytest

from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Computing, Model
from diffmegatron.evaluation.requests import Generation
from diffmegatron.evaluation.targets import find_targets
from diffmegatron.evaluation.vllm_model import VllmModel
from tests.pretrained import write_pretrained
from tests.unit.evaluation import stand_in_vllm

VLLM = Computing(engine="vllm")


def served(**options: object) -> EvaluateSettings:
    """Return settings of an evaluation with vLLM."""
    return EvaluateSettings(engine="vllm", **options)


@pytest.fixture
def llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(sys.modules, "vllm", stand_in_vllm)
    return write_pretrained(tmp_path / "llama", "llama 2", max_position_embeddings=512)


def both(folder: Path, requests: list[Generation], end: int = 256) -> list[dict]:
    """Return the answers of transformers and of the stand-in for vLLM to the same requests.

    Args:
        folder: Hugging Face folder of the model.
        requests: requests for texts.
        end: id of the end-of-document token.
    """
    (target,) = find_targets([folder], folder / "out")
    target.tokenizer.end_of_document = end
    models = (Model(target), VllmModel(target, VLLM))
    return [dict(model.answers(requests)) for model in models]


def test_texts_are_those_of_transformers(llama):
    """Check that both engines write equal texts, which end at a limit, a stop string or a token."""
    prompts = [[1, 5, 6, 7], [1, 60, 61], [1, 100, 101, 102, 103]]
    free = [Generation(prompt, 12) for prompt in prompts]
    expected, found = both(llama, free)
    assert found == expected
    assert {len(tokens) for tokens in found.values()} == {12}

    written = found[1]
    (target,) = find_targets([llama], llama / "out")
    word = target.tokenizer.decode(written[:2])
    expected, found = both(llama, [Generation(each, 12, (word, "never")) for each in prompts])
    assert found == expected
    assert found[1] == written[:2]

    # Use a token that the model generates early as the end-of-document token.
    expected, found = both(llama, free, end=written[1])
    assert found == expected
    assert found[1] == written[:1]


def test_a_generation_suite_has_the_same_texts_in_both_engines(llama, tmp_path):
    rows = [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in range(4)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    for split in ("train", "test"):
        (tmp_path / f"gsm8k_{split}.jsonl").write_text(text)
    settings = ["math.benchmarks=[gsm8k]", "math.answer_tokens=20", "math.shots=1"]
    texts = []
    for engine in ("transformers", "vllm"):
        out = tmp_path / engine
        chosen = EvaluateSettings(data_dir=tmp_path, engine=engine)
        evaluate([llama], ["math"], out, chosen, settings)
        lines = (out / "math/llama.jsonl").read_text().splitlines()[1:]
        texts.append({each["item"]: each["text"] for each in map(json.loads, lines)})
    assert "vllm of the stand-in" in (out / "report.md").read_text()
    assert texts[0] == texts[1]
    assert all(texts[0].values())
    # A results file of the other engine must not be continued.
    with pytest.raises(UserError, match="has results for other engine"):
        evaluate([llama], ["math"], tmp_path / "transformers", chosen, settings)


def test_models_that_vllm_cannot_compute_are_refused(llama, tmp_path):
    diffllama = write_pretrained(tmp_path / "v1", "diffllama")
    changed = write_pretrained(tmp_path / "v2", "diff_v2")
    with (changed / "modeling_diff_v2.py").open("a") as file:
        file.write("# changed")
    for folder, sentence in (
        (diffllama, r"v1 has model_type 'diffllama', whose layers have two attention calls"),
        (changed, r"v2 contains other code than this version's for model_type 'diff_v2'"),
    ):
        with pytest.raises(UserError, match=sentence):
            evaluate([llama, folder], ["needle"], tmp_path, served(haystack=tmp_path), [])


@pytest.mark.parametrize(
    ("suite", "computing", "said"),
    [
        ("attention-analysis", {}, "suite 'attention-analysis' does not send requests"),
        ("throughput", {}, "suite 'throughput' does not send requests"),
        ("needle", {"device": "cpu"}, "leave out the launcher, --device"),
        ("needle", {"batch_tokens": 8}, "leave out the launcher, --device"),
    ],
)
def test_unsupported_suites_and_options_are_refused(suite, computing, said, llama, tmp_path):
    options = served(haystack=tmp_path, data=(str(tmp_path),), **computing)
    with pytest.raises(UserError, match=said):
        evaluate([llama], [suite], tmp_path, options, [])


def test_a_missing_vllm_is_an_error(llama, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="--engine vllm needs vLLM, which cannot be imported"):
        evaluate([llama], ["needle"], tmp_path, served(haystack=tmp_path), [])


def test_a_model_that_vllm_cannot_load_is_a_one_line_error(llama, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("Model architectures ['X']\nare not supported")

    monkeypatch.setattr(stand_in_vllm, "LLM", refuse)
    (target,) = find_targets([llama], llama / "out")
    with pytest.raises(UserError, match=r"vLLM cannot load .*are not supported") as caught:
        list(VllmModel(target, VLLM).answers([Generation([1], 2)]))
    assert "\n" not in str(caught.value)
