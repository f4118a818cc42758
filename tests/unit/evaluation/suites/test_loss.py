"""Tests of the suite ``loss``: means over the first tokens of windows, remarks and the figure."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffmegatron.evaluation.requests import Scored, Scoring
from diffmegatron.evaluation.suite import Item
from diffmegatron.evaluation.suites.loss import Loss
from diffmegatron.evaluation.suites.recall import Recall
from tests.unit.evaluation.stand_ins import Answering

# The three documents have these numbers of tokens. They are cut into windows of at most 40 tokens,
# which have (40, 40, 20), (25) and (40, 5) tokens.
LENGTHS = (100, 25, 45)


def loss_of(position: int, document: int) -> float:
    """Return the stand-in model's loss in nats, which differs for every position and document."""
    return 1.0 + document + np.sin(position)


TARGET = SimpleNamespace(
    start_token=0,
    tokenizer=SimpleNamespace(end_of_document=256),
    encode=lambda text: list(text.encode()),
)


def windows_of(document: int) -> Answering:
    """Return a stand-in model whose n-th answer has the losses of the document's n-th window."""
    positions = itertools.count()

    def answer(request: Scoring) -> list[Scored]:
        (window,) = request.continuations
        nats = [loss_of(place, document) for place in itertools.islice(positions, len(window))]
        return [Scored(torch.tensor(nats), torch.zeros(0))]

    return Answering(answer, TARGET)


def totals_of(suite: Loss) -> dict[str, tuple[float, float]]:
    found: dict[str, np.ndarray] = {}
    for document, length in enumerate(LENGTHS):
        record = suite.score(windows_of(document), Item(str(document), 0, ("text", "x" * length)))
        for name, share in suite.means(record).items():
            found[name] = found.get(name, 0) + np.array([share.total, share.weight])
    return found


def test_means_over_the_first_tokens_of_windows_match_their_definition():
    """Compare the means with their definition in docs/reference/suites.md."""
    suite = Loss(data=("text",), context=41)
    windows = [
        [loss_of(place, document) for place in range(first, min(first + 40, length))]
        for document, length in enumerate(LENGTHS)
        for first in range(0, length, 40)
    ]
    found = totals_of(suite)
    assert suite.lengths == [16, 32, 40]
    for n in suite.lengths:
        full = [each[:n] for each in windows if len(each) == 40]
        own = [each[:n] for each in windows if len(each) >= n]
        assert len(full) == 3
        for name, of in (("", full), (" of windows that have as many", own)):
            nats, tokens = found[f"nats per token, tokens 1 to {n}{name}"]
            assert tokens == sum(map(len, of))
            assert nats / tokens == pytest.approx(np.mean(np.concatenate(of)), rel=1e-6)
    # Five windows have 16 or more tokens: three full ones, one of 20 and one of 25 tokens.
    assert found["nats per token, tokens 1 to 16 of windows that have as many"][1] == 5 * 16
    assert not [name for name in found if "1 to 41" in name]


def test_a_remark_reports_that_no_window_is_full():
    suite = Loss(data=("text",), context=2048)
    record = suite.score(windows_of(0), Item("0", 0, ("text", "x" * 100)))
    (remark,) = suite.remarks({"model": [record]})
    assert remark.startswith("model: no window has 2,047 tokens")
    assert "nats per token, tokens 1 to 64 of windows that have as many" in suite.means(record)
    assert not suite.draw(Figure(), {"model": [record]})


@pytest.mark.parametrize("context", [2048, 65536])
def test_documents_are_long_enough_for_the_context(context, tmp_path):
    (tmp_path / "book.txt").write_text("word " * 200_000)
    suite = Loss(data=(str(tmp_path / "book.txt"),), context=context)
    ((_, (_, text)),) = [(item.key, item.content) for item in suite.items(None)]
    assert len(text) == max(20_000, 8 * context)
    assert Recall.model_fields["characters"].default is None


def test_every_length_on_a_narrow_axis_has_a_tick_label():
    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    suite = Loss(data=("text",), context=129)
    records = [
        {
            "source": "text",
            "bytes": 100,
            "nats": 300.0,
            "tokens": 128,
            "beginnings": {},
            "full": {str(n): [nats * n, n] for n in suite.lengths},
        }
        for nats in (3.0, 4.0)
    ]
    assert suite.draw(figure, {"model": records})
    canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    ticks = axes.xaxis.get_major_ticks()
    shown = [each.label1.get_text() for each in ticks if low <= each.get_loc() <= high]
    assert shown == ["16", "32", "64", "128"]
    # The band shows the interval of the mean over two documents with losses 3 and 4.
    band = axes.collections[0].get_paths()[0].get_extents()
    assert (band.y0, band.y1) == (3.0, 4.0)
