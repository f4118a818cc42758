"""Tests of the suite ``associative-recall`` with stand-ins for a target and its model."""

import json
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.requests import Scored, Scoring
from diffmegatron.evaluation.suites.recall import AssociativeRecall
from tests.unit.evaluation.stand_ins import Answering

TARGET = SimpleNamespace(name="model", encode=lambda text: [ord(word) for word in text.split()])
# Keys are lower-case letters, and values are upper-case letters. The second half of a text repeats
# the pairs of the first half in another order.
TEXTS = ["a X b Y c X d Z c X a X d Z b Y", "a X b Y b Y a X"]


def follows(but_not: str) -> Answering:
    """Return a stand-in model that recalls which token followed an earlier occurrence.

    After each token, the model predicts the token that followed the first occurrence of this token.

    Args:
        but_not: characters after which the prediction is wrong.
    """

    def answer(request: Scoring) -> list[Scored]:
        (continuation,) = request.continuations
        ids = [*request.context, *continuation]
        likeliest = [
            chr(ids[place]) not in but_not and ids[ids.index(ids[place]) + 1] == ids[place + 1]
            for place in range(len(request.context) - 1, len(ids) - 1)
        ]
        return [Scored(torch.zeros(len(continuation)), torch.tensor(likeliest))]

    return Answering(answer, TARGET)


def make_suite(tmp_path, texts):
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return AssociativeRecall(data=(str(path),))


@pytest.mark.parametrize(("but_not", "right"), [("", [4, 2]), ("a", [3, 1]), ("ad", [2, 1])])
def test_accuracy_is_the_share_of_recalled_pairs(tmp_path, but_not, right):
    suite = make_suite(tmp_path, TEXTS)
    items = suite.items(TARGET)
    records = [suite.score(follows(but_not), item) for item in items]
    assert records == [{"pairs": 4, "right": right[0]}, {"pairs": 2, "right": right[1]}]
    shares = [suite.means(record) for record in records]
    assert [s["accuracy"].total for s in shares] == right
    assert shares[0]["accuracy, 4 pairs"] == shares[0]["accuracy"]
    assert suite.draw(Figure(), {"model": records})


@pytest.mark.parametrize(
    "text",
    ["a X b Y a X b Z", "a X b Y a X", "a X a Y a Y a X", "a X b Y a X c Y"],
    ids=["another value", "a pair less", "one key twice", "another key"],
)
def test_texts_that_do_not_repeat_their_pairs_are_refused(tmp_path, text):
    with pytest.raises(UserError, match="are not pairs of different keys and the same pairs again"):
        make_suite(tmp_path, [text]).items(TARGET)


def test_a_non_finite_loss_is_an_error(tmp_path):
    suite = make_suite(tmp_path, TEXTS)
    model = Answering(lambda _: NotFiniteError("the loss of token 9"), TARGET)
    with pytest.raises(NotFiniteError, match="the loss of token 9"):
        suite.score(model, suite.items(TARGET)[0])
