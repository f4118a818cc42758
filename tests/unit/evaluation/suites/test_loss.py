"""The picture of suite loss."""

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from diffmegatron.evaluation.suites.loss import Loss


def test_every_position_of_a_narrow_range_has_its_number() -> None:
    figure = Figure()
    canvas = FigureCanvasAgg(figure)
    positions = {str(power): (3.0 * 2**power, max(1, 2**power // 2)) for power in range(8)}
    record = {
        "source": "text",
        "bytes": 100,
        "nats": 300.0,
        "tokens": 127,
        "positions": positions,
    }
    assert Loss(data=("text",), context=128).draw(figure, {"model": [record]})
    canvas.draw()
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    ticks = axes.xaxis.get_major_ticks()
    shown = [each.label1.get_text() for each in ticks if low <= each.get_loc() <= high]
    assert shown == ["16", "32", "64", "128"]
