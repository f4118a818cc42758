"""Tests of ``diffmegatron generate``, except ``--engine vllm``, which tests/serving runs."""

from pathlib import Path

import pytest

from diffmegatron.data.tokenizers import CHAT_END
from diffmegatron.errors import UserError
from diffmegatron.evaluation.evaluate_settings import GenerateSettings
from diffmegatron.evaluation.generate import _parts, written_texts
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Generation
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pretrained(tmp_path_factory.mktemp("generate") / "v2", "diff_v2")


def test_the_text_is_that_of_the_same_request_in_an_evaluation(folder: Path) -> None:
    (target,) = find_targets([folder], folder)
    prompt = "def f(x):"
    ((_, ids),) = Model(target).answers([Generation(target.encode(prompt), 12)])
    written = list(written_texts(folder, [prompt, prompt], GenerateSettings(max_tokens=12)))
    assert "".join(written) == 2 * (prompt + target.tokenizer.decode(ids) + "\n")
    assert len(written) > 8


def test_a_temperature_samples_and_a_seed_repeats_the_sample(folder: Path) -> None:
    def text(seed: int) -> str:
        settings = GenerateSettings(max_tokens=12, temperature=2.0, seed=seed)
        return "".join(written_texts(folder, ["a"], settings))

    assert text(1) == text(1) != text(2)


def test_no_part_splits_a_character_or_contains_the_end_of_a_message(folder: Path) -> None:
    (target,) = find_targets([folder], folder)
    ids = target.encode(f"é <|im_x {CHAT_END} more")
    assert "".join(parts := list(_parts(iter(ids), target, CHAT_END))) == "é <|im_x "
    assert parts[0] == "é"
    end = target.tokenizer.end_of_document
    assert list(_parts(iter([97, end, 98]), target, None)) == ["a", ""]


def test_prompts_that_cannot_be_answered_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="v2 has no chat template; leave out --chat"):
        list(written_texts(folder, ["a"], GenerateSettings(chat=True)))
    with pytest.raises(UserError, match="a prompt has 64 tokens and v2 a context of 64"):
        list(written_texts(folder, ["a" * 64], GenerateSettings()))
