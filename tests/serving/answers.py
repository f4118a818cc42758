"""Answers of models to the same requests, by ``transformers`` or by vLLM.

``python -m tests.serving.answers FOLDER`` runs vLLM on the exports in FOLDER/vllm, and writes their
answers to FOLDER/vllm.json.
"""

import functools
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from diffmegatron.errors import NotFiniteError
from diffmegatron.evaluation import evaluate as evaluation
from diffmegatron.evaluation.evaluate_settings import Computing, EvaluateSettings
from diffmegatron.evaluation.model import Model
from diffmegatron.evaluation.requests import Generation, LabelTree, Request, Scored, Scoring
from diffmegatron.evaluation.targets import Target
from diffmegatron.evaluation.vllm_model import VllmModel

NAMES = ("pattern", "diff_v2", "diff_v2_r1", "diff_v1", "grouped", "grouped_r1", "dex")
LENGTHS = (1, 3, 7, 20, 33, 50, 75, 90)
NEW_TOKENS = 64
# Small batches and blocks, so that prompts wait, are read in chunks, and share blocks of the cache.
OPTIONS = {
    "enforce_eager": True,
    "block_size": 32,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 4,
    "enable_prefix_caching": True,
}
SETTINGS = ["math.benchmarks=[gsm8k]", "math.answer_tokens=20", "math.shots=1"]


def prompts() -> list[list[int]]:
    """Return token ids of unequal length, which all begin with the same tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(256, (2, 100), generator=generator).tolist()
    return [[*ids[0][: min(n, 40)], *ids[1][: max(0, n - 40)]] for n in LENGTHS]


def requests() -> list[Request]:
    """Return requests for likelihoods, texts and labels after each of the prompts."""
    labels = LabelTree({7: LabelTree({5: LabelTree(), 6: LabelTree()}), 8: LabelTree()})
    return [
        *(Scoring(ids[:1], [ids[1:], [3, 4], [3, 5]]) for ids in prompts()[1:]),
        *(Generation(ids, NEW_TOKENS) for ids in prompts()),
        *(Generation(ids, 2, labels=labels) for ids in prompts()),
    ]


def answers(folder: Path, computing: Computing) -> dict[str, list[Any]]:
    """Evaluate the exports in FOLDER/ENGINE, and return the answers of each to :func:`requests`.

    An answer is a list of token ids, or the losses and whether the token is most likely.
    """
    models: dict[str, Model] = {}

    def model(target: Target, _: Computing) -> Model:
        kind = Model if computing.engine == "transformers" else VllmModel
        return models.setdefault(target.name, kind(target, computing))

    with patch.multiple(evaluation, Model=model, VllmModel=model):
        evaluation.evaluate(
            [folder / computing.engine / name for name in NAMES],
            ["loss", "math"],
            folder / f"{computing.engine}.out",
            EvaluateSettings(
                data=[str(folder / "text.txt")], data_dir=folder, engine=computing.engine
            ),
            SETTINGS,
        )
    found = {}
    for name, each in models.items():
        by_number = dict(each.answers(requests()))
        found[name] = [_plain(by_number[number]) for number in range(len(by_number))]
        # Each stream ends before its last token.
        streams = (each.stream([65, 66], count, 0.0, 0) for count in (8, 9))
        found[name] += [list(islice(stream, 5)) for stream in streams]
    return found


def _plain(answer: Any) -> Any:
    assert not isinstance(answer, NotFiniteError), answer
    if isinstance(answer[0], Scored):
        return [[each.losses.tolist(), each.is_most_likely.tolist()] for each in answer]
    return answer


def main(folder: Path) -> None:
    import vllm

    vllm.LLM = functools.partial(vllm.LLM, **OPTIONS)
    found = answers(folder, Computing(engine="vllm"))
    (folder / "vllm.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
