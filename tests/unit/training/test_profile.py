"""``training.profile``: a trace that contains exactly the requested steps."""

import gzip
import json
from pathlib import Path

import pytest

from diffmegatron.errors import UserError
from diffmegatron.training.trainer import train


def traced(run_dir: str) -> dict[str, int]:
    """Return the number of steps of each trace, by file name."""
    found = {}
    for path in (Path(run_dir) / "profile").iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert any(event.get("name") == "aten::mm" for event in events)
        phases = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        counts = {phases.count(phase) for phase in ("data", "forward_backward", "update")}
        (found[path.name],) = counts
    return found


@pytest.mark.parametrize(("start", "steps", "expected"), [(1, 1, 1), (3, 2, 2), (5, 9, 1)])
def test_a_trace_has_the_steps_asked_for(start, steps, expected, tiny_recipe):
    recipe = tiny_recipe(
        "training.steps=5",
        "training.eval_batches=0",
        f"training.profile={{start: {start}, steps: {steps}, ranks: [0, 7]}}",
    )
    assert train(recipe)
    assert traced(recipe.run_dir) == {f"rank_00000.step_{start:08d}.pt.trace.json.gz": expected}


def test_a_start_past_the_end_is_refused(tiny_recipe):
    with pytest.raises(UserError, match=r"training\.profile\.start 21 .* 20 steps"):
        tiny_recipe("training.profile.start=21")
