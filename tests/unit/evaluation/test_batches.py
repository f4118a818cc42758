"""Tests that requests in a batch get the same answers as one request at a time."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation import model as model_module
from diffmegatron.evaluation.evaluate import evaluate
from diffmegatron.evaluation.evaluate_settings import EvaluateSettings
from diffmegatron.evaluation.model import Computing, Model
from diffmegatron.evaluation.requests import Generation, LabelTree, Scored, Scoring
from diffmegatron.evaluation.targets import find_targets
from tests.pretrained import write_pretrained

# Each model to test has a pair (family in tests.pretrained, changed values of its configuration).
# There is a model for each kind of attention, one with layers of two kinds, and one with sliding
# windows. A sliding window has 4 tokens, and padding must not count as one of them.
KINDS = {
    "llama": ("llama 2", {}),
    "diffllama": ("diffllama", {}),
    "diff_v2": ("diff_v2", {}),
    "grouped": ("grouped", {}),
    "grouped with a constant lambda": ("grouped, its own lambda", {}),
    "layers of two kinds": (
        "grouped",
        {
            "model_type": "mixed_diff",
            "layer_kinds": [
                {
                    "layers": "1",
                    "model_type": "diff_v2",
                    "num_attention_heads": 6,
                    "num_key_value_heads": 2,
                    "signal_per_noise": 2,
                },
                {
                    "layers": None,
                    "model_type": "grouped_diff",
                    "num_attention_heads": 6,
                    "num_key_value_heads": 4,
                    "signal_per_noise": 2,
                },
            ],
        },
    ),
    "sliding windows": ("mistral", {"sliding_window": 4}),
}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    family, changes = KINDS[request.param]
    path = tmp_path_factory.mktemp("kinds") / "hf"
    return write_pretrained(path, family, max_position_embeddings=256, **changes)


def open_model(folder: Path, batch_tokens: int) -> Model:
    (target,) = find_targets([folder], folder / "out")
    return Model(target, Computing(batch_tokens=batch_tokens))


def some_ids(draw: random.Random, low: int, high: int) -> list[int]:
    return [draw.randrange(256) for _ in range(draw.randint(low, high))]


def answers(model: Model, requests: list) -> list:
    found = dict(model.answers(requests))
    assert sorted(found) == list(range(len(requests)))
    return [found[number] for number in range(len(requests))]


def scoring_requests() -> list[Scoring]:
    """Return requests with contexts of several lengths and one or more continuations.

    In the last request, two continuations differ only in their last token.
    """
    draw = random.Random(0)
    many = [
        Scoring(some_ids(draw, 1, 20), [some_ids(draw, 1, 9) for _ in range(draw.randint(1, 4))])
        for _ in range(9)
    ]
    start = some_ids(draw, 3, 3)
    return [
        *many,
        Scoring([256], [[7, 8, 9], [5]]),
        Scoring([1, 2], [[*start, 4], [*start, 5], [6]]),
    ]


def expected_score(network, request: Scoring, continuation: list[int]) -> tuple:
    """Return the losses of a continuation in nats, and whether each token is the most likely.

    The text is a batch of its own, so it has no padding.
    """
    ids = torch.tensor([[*request.context, *continuation]])
    with torch.no_grad():
        logits = network(ids, use_cache=False).logits[0, len(request.context) - 1 : -1]
    wanted = torch.tensor(continuation)
    nats = -logits.double().log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    return nats, logits.argmax(-1) == wanted


def test_likelihoods_are_those_of_single_texts(folder):
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    requests = scoring_requests()
    for batch_tokens in (1, 200, 5000):
        model = open_model(folder, batch_tokens)
        for request, answer in zip(requests, answers(model, requests), strict=True):
            for continuation, scored in zip(request.continuations, answer, strict=True):
                nats, likeliest = expected_score(network, request, continuation)
                assert (scored.losses.double() - nats).abs().max() < 2e-5
                assert torch.equal(scored.is_most_likely, likeliest)


def naive_greedy(network, request: Generation, decode) -> list[int]:
    """Decode greedily with a forward pass over the whole text for each token."""
    found: list[int] = []
    while len(found) < request.limit:
        with torch.no_grad():
            logits = network(torch.tensor([[*request.ids, *found]]), use_cache=False).logits[0, -1]
        token = int(logits.argmax())
        if token == 256:
            break
        found.append(token)
        if any(stop in decode(found) for stop in request.stop):
            break
    return found


def test_batched_texts_equal_those_generated_alone(folder):
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    draw, shared = random.Random(1), [256, 72, 101, 108]
    prompts = [some_ids(draw, 1, 30) for _ in range(7)]
    requests = [Generation(ids, draw.randint(1, 25)) for ids in prompts]
    requests += [Generation([*shared, *ids], 12, shared=len(shared)) for ids in prompts]
    # Add requests with stop strings that occur in some of the texts.
    decode = open_model(folder, 1).target.tokenizer.decode
    written = [decode(naive_greedy(network, request, decode)) for request in requests]
    stops = tuple(text[3:5] for text in written[:4] if len(text) > 5)
    requests += [Generation(ids, 25, stops) for ids in prompts]
    expected = [naive_greedy(network, request, decode) for request in requests]
    assert len({len(text) for text in expected}) > 5
    for batch_tokens in (1, 120, 5000):
        assert answers(open_model(folder, batch_tokens), requests) == expected


def tree(*paths: tuple[int, ...]) -> LabelTree:
    root = LabelTree()
    for path in paths:
        node = root
        for token in path:
            node = node.setdefault(token, LabelTree())
        node.label = str(path)
    return root


def test_labels_are_the_likeliest_allowed_path(folder):
    network = AutoModelForCausalLM.from_pretrained(folder).eval()
    labels = tree((5, 6, 7), (5, 6, 8, 9), (5, 9), (70,), (80, 81, 82), (80, 83))
    draw, shared = random.Random(2), [256, 72, 101]
    prompts = [[*shared, *some_ids(draw, 1, 12)] for _ in range(12)]
    requests = [Generation(ids, labels.depth, shared=3, labels=labels) for ids in prompts]
    expected = []
    for ids in prompts:
        node, path = labels, []
        while node:
            with torch.no_grad():
                logits = network(torch.tensor([[*ids, *path]]), use_cache=False).logits[0, -1]
            path.append(max(node, key=lambda token: logits[token].item()))
            node = node[path[-1]]
        expected.append(path)
    assert len({tuple(path) for path in expected}) > 2
    for batch_tokens in (1, 100, 5000):
        assert answers(open_model(folder, batch_tokens), requests) == expected


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return write_pretrained(tmp_path_factory.mktemp("plain") / "hf", "llama 2")


def test_non_finite_requests_do_not_affect_others_in_the_batch(plain):
    model = open_model(plain, 5000)
    with torch.no_grad():
        model.network.get_input_embeddings().weight[77] = torch.nan
    good = [Scoring([1, 2], [[3, 4], [5]]), Generation([1, 2, 3], 4)]
    bad = [Scoring([1, 77, 2], [[3, 4], [5]]), Generation([77, 2, 3, 4, 5], 4)]
    bad += [Scoring([1, 2, 4, 6], [[3, 77, 4]])]
    found = answers(model, [*good, *bad])
    alone = answers(open_model(plain, 1), good)
    torch.testing.assert_close(found[0][0].losses, alone[0][0].losses)
    assert found[1] == alone[1]
    assert [str(answer) for answer in found[2:4]] == [
        "the loss of token 3 of 5 is not finite",
        "a logit after 5 tokens is not finite",
    ]
    assert all(isinstance(answer, NotFiniteError) for answer in found[2:])


def test_a_batch_that_does_not_fit_is_halved(plain, monkeypatch):
    model = open_model(plain, 5000)
    requests = [Scoring([1] * length, [[3, 4]]) for length in range(1, 14)]
    sizes, score = [], model_module.score

    def small_memory(network, batch):
        sizes.append(len(batch))
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(network, batch)

    monkeypatch.setattr(model_module, "score", small_memory)
    found = answers(model, requests)
    assert sizes[:3] == [13, 6, 3] and max(sizes[3:]) <= 7
    monkeypatch.undo()
    expected = answers(open_model(plain, 1), requests)
    for (one,), (other,) in zip(found, expected, strict=True):
        torch.testing.assert_close(one.losses, other.losses, atol=1e-5, rtol=0)


def test_a_single_text_that_does_not_fit_is_named(plain, monkeypatch):
    def no_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(model_module, "score", no_memory)
    with pytest.raises(
        UserError, match=r"request of 5 tokens for hf does not fit .* --dtype bfloat16"
    ):
        answers(open_model(plain, 5000), [Scoring([1, 2, 3], [[4, 5]])])


def test_batches_have_texts_of_similar_lengths_up_to_the_budget(plain, monkeypatch):
    model, batches = open_model(plain, 40), []
    score = model_module.score

    def watched(network, batch):
        batches.append([len(request.context) + 1 for request in batch])
        return score(network, batch)

    monkeypatch.setattr(model_module, "score", watched)
    answers(model, [Scoring([1] * length, [[2]]) for length in (3, 50, 9, 20, 4, 19, 3, 8)])
    assert batches == [[51], [21], [20, 10], [9, 5, 4, 4]]


def test_contexts_and_shared_tokens_are_read_once(plain):
    """Check by input shapes that the network processes contexts and shared tokens only once."""
    model, read = open_model(plain, 5000), []
    model.network.model.register_forward_pre_hook(
        lambda _, args, kwargs: read.append((*args, kwargs.get("input_ids"))[0].shape),
        with_kwargs=True,
    )
    answers(model, [Scoring([1] * 20, [[2, 3], [4, 5], [6, 7]])])
    # Leave out inputs of 4 tokens. The network runs on them before its first batch, to find out
    # whether its logits are a plain projection of the last hidden states.
    assert [tuple(shape) for shape in read if shape != (1, 4)] == [(1, 19), (3, 2)]
    read.clear()
    requests = [Generation([1] * 20 + [last], 1, shared=20) for last in range(6)]
    model._batch_tokens = 66
    answers(model, requests)
    assert [tuple(shape) for shape in read] == [(1, 20), (3, 1), (3, 1)]


def test_a_model_computes_in_the_requested_dtype(plain):
    (target,) = find_targets([plain], plain / "out")
    model = Model(target, Computing(dtype="bfloat16"))
    assert model.network.dtype == torch.bfloat16
    (answer,) = answers(model, [Scoring([1, 2], [[3, 4]])])
    (single,) = answers(open_model(plain, 1), [Scoring([1, 2], [[3, 4]])])
    assert isinstance(answer[0], Scored) and answer[0].losses.dtype == torch.float32
    difference = (answer[0].losses - single[0].losses).abs().max()
    assert 0 < difference < 0.1


def test_a_context_without_tokens_is_refused(plain):
    for request in (Scoring([], [[1, 2]]), Scoring([1], [[2], []])):
        with pytest.raises(ValueError, match="without tokens"):
            answers(open_model(plain, 1), [request])


def test_a_file_of_another_dtype_is_refused(plain, tmp_path):
    (tmp_path / "text.jsonl").write_text('{"text": "Some words."}')
    data = (str(tmp_path / "text.jsonl"),)
    evaluate([plain], ["loss"], tmp_path, EvaluateSettings(data=data), [])
    other = EvaluateSettings(data=data, dtype="bfloat16")
    with pytest.raises(UserError, match="has results for other dtype"):
        evaluate([plain], ["loss"], tmp_path, other, [])


def test_device_cuda_without_a_gpu_is_an_error():
    if torch.cuda.is_available():
        pytest.skip("the sentence is for machines without a GPU")
    with pytest.raises(UserError, match="--device cuda needs a GPU"):
        Computing(device="cuda")
