"""The numbers of a run: ``metrics.jsonl`` and TensorBoard events with the same names."""

import json
import math
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
        self._run_dir = run_dir
        self._open(resumed_step)

    def rewind(self, step: int) -> None:
        """Drop what lies after a step that the run has gone back to."""
        self.close()
        self._open(step)

    def close(self) -> None:
        """Close both files."""
        self._file.close()
        self._board.close()

    def _open(self, resumed_step: int) -> None:
        run_dir = self._run_dir
        path = run_dir / METRICS
        kept = [entry for entry in read_metrics(run_dir) if entry["step"] <= resumed_step]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        unfinished.rename(path)
        self._file = path.open("a")
        self._board = SummaryWriter(run_dir / TENSORBOARD, purge_step=resumed_step + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Record the values of a step; those that are not finite are left out (JSON has none)."""
        values = {name: value for name, value in values.items() if math.isfinite(value)}
        entry = {"step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """Every recorded entry of a run, oldest first; an unfinished last line is passed over."""
    path = run_dir / METRICS
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
