"""The numbers of a run: ``metrics.jsonl`` and TensorBoard events with the same names."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"
TENSORBOARD = "tensorboard"


class MetricsWriter:
    """Appends to both. A resumed run continues them: what lies after its step is dropped."""

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        path = run_dir / METRICS
        kept = [entry for entry in read_metrics(run_dir) if entry["step"] <= resumed_step]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        unfinished.rename(path)
        self._file = path.open("a")
        self._board = SummaryWriter(run_dir / TENSORBOARD, purge_step=resumed_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step."""
        entry = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._board.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Every recorded entry of a run, oldest first; an unfinished last line is passed over."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
