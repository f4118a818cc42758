"""Tests of the suite ``perplexity`` against the loop in the documentation of transformers."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from tests.pretrained import write_pretrained

DOCUMENTS = ["One day a cat sat on a mat. " * 3, "A second text.", "And the last of them, longer."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("perplexity")
    write_pretrained(found / "hf", "diffllama")
    lines = (json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    (found / "text.jsonl").write_text("".join(lines))
    return found


def measured(folder: Path, out: Path, *settings: str) -> dict:
    options = EvaluateSettings(data=(str(folder / "text.jsonl"),))
    given = [f"perplexity.{each}" for each in settings]
    evaluate([folder / "hf"], ["perplexity"], out, options, given)
    return json.loads((out / "results.json").read_text())["suites"]["perplexity"]


@torch.no_grad()
def documented_loop(network, ids: torch.Tensor, max_length: int, stride: int) -> float:
    """Return the perplexity by the loop in https://huggingface.co/docs/transformers/perplexity."""
    sum_of_nats, tokens, previous_end = 0.0, 0, 0
    for begin in range(0, ids.size(1), stride):
        end = min(begin + max_length, ids.size(1))
        wanted_length = end - previous_end
        input_ids = ids[:, begin:end]
        target_ids = input_ids.clone()
        target_ids[:, :-wanted_length] = -100
        loss = network(input_ids, labels=target_ids).loss
        # ``loss`` is the mean over the labels that are not -100. The first label never counts,
        # because it has no prediction. (The loop on the page always subtracts one from the number
        # of labels that are not -100, even if the first label is -100 and is thus not among them.)
        shifted = int((target_ids[:, 1:] != -100).sum())
        sum_of_nats += loss.item() * shifted
        tokens += shifted
        previous_end = end
        if end == ids.size(1):
            break
    return math.exp(sum_of_nats / tokens)


@pytest.mark.parametrize(
    ("context", "stride"), [(32, 16), (32, 32), (20, 7), (40, 1), (60, 59), (28, 28)]
)
def test_perplexity_equals_the_loop_in_the_docs_of_transformers(context, stride, folder, tmp_path):
    network = AutoModelForCausalLM.from_pretrained(folder / "hf").eval()
    ids = torch.tensor([list("\n\n".join(DOCUMENTS).encode())])
    found = measured(folder, tmp_path, f"context={context}", f"stride={stride}")
    total = found["totals"]["hf"]["perplexity"]
    expected = documented_loop(network, ids, context, stride)
    assert total["value"] == pytest.approx(expected, rel=1e-5)
    assert total["low"] < total["value"] < total["high"]
    assert total["items"] == math.ceil((ids.size(1) - context) / stride) + 1
    nats = found["measures"]["nats per token"]["targets"]["hf"]
    assert math.exp(nats["low"]) == pytest.approx(total["low"])
    assert (tmp_path / "perplexity.png").exists()


def test_the_stride_is_half_of_the_context_unless_it_is_set(folder, tmp_path):
    assert (
        measured(folder, tmp_path / "a", "context=32")["totals"]
        == measured(folder, tmp_path / "b", "context=32", "stride=16")["totals"]
    )


def test_a_stride_past_the_context_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match=r"perplexity\.stride 33 exceeds perplexity\.context 32"):
        measured(folder, tmp_path, "context=32", "stride=33")
