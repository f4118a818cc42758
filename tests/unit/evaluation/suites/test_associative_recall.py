"""The suite ``associative-recall``, on stand-ins for a target and its model."""

import json
from types import SimpleNamespace

import pytest
import torch
from matplotlib.figure import Figure

from diffmegatron.errors import NotFiniteError, UserError
from diffmegatron.evaluation.suites.associative_recall import AssociativeRecall

TARGET = SimpleNamespace(name="model", encode=lambda text: [ord(word) for word in text.split()])
# Values are upper case. The second text asks for two pairs of another order.
TEXTS = ["a X b Y c X d Z c X a X d Z b Y", "a X b Y b Y a X"]


class Follows:
    """Stands for a model: after a token comes the token that followed it at first."""

    def __init__(self, but_not: str = "", *, value: float = 1.0) -> None:
        self.but_not, self.value = but_not, value

    def last_logits(self, texts, counts):
        ((ids,), (count,)) = texts, counts
        logits = torch.zeros(count, 128)
        for row, place in enumerate(range(len(ids) - count, len(ids))):
            token = ids[place]
            if chr(token) not in self.but_not:
                logits[row, ids[ids.index(token) + 1]] = self.value
        return [logits]


def make_suite(tmp_path, texts):
    path = tmp_path / "held_out.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return AssociativeRecall(data=(str(path),))


@pytest.mark.parametrize(("but_not", "right"), [("", [4, 2]), ("a", [3, 1]), ("ad", [2, 1])])
def test_accuracy_is_the_share_of_pairs_that_are_known(tmp_path, but_not, right):
    suite = make_suite(tmp_path, TEXTS)
    items = suite.items(TARGET)
    records = [suite.score(Follows(but_not), item) for item in items]
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
def test_other_texts_are_refused(tmp_path, text):
    with pytest.raises(UserError, match="are not pairs of different keys and the same pairs again"):
        make_suite(tmp_path, [text]).items(TARGET)


def test_logits_that_are_not_finite_are_named(tmp_path):
    suite = make_suite(tmp_path, TEXTS)
    with pytest.raises(NotFiniteError, match="a logit after a key"):
        suite.score(Follows(value=float("nan")), suite.items(TARGET)[0])
