"""Metrics of a run: their files are continued and repaired, and file errors never end a run."""

import json
import logging
import os
import subprocess
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from diffmegatron.errors import UserError
from diffmegatron.training.monitoring import records
from diffmegatron.training.monitoring.metrics import (
    METRICS,
    TENSORBOARD,
    MetricsWriter,
    read_metrics,
)
from diffmegatron.training.monitoring.records import MetricRecords

STEPS = range(1, 6)


@pytest.fixture(autouse=True)
def number_files_from_0(monkeypatch):
    """Restart the numbers in the names of TensorBoard's files at 0 for each test.

    TensorBoard reads files that were created in the same second in the order of their names. In
    this order, 10 precedes 9.
    """
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))


@pytest.fixture
def recorded(tmp_path) -> Path:
    """Return a run_dir whose metrics have five entries."""
    with MetricsWriter(tmp_path, -1) as metrics:
        for step in STEPS:
            metrics.write(step, {"train/loss": 1 / step, "of/one": float("nan")})
    return tmp_path


def steps(run_dir: Path) -> list[float]:
    return [entry["step"] for entry in read_metrics(run_dir)]


def on_the_board(run_dir: Path, name: str = "train/loss") -> list[tuple[int, float]]:
    """Return the steps and values that TensorBoard reads from its files."""
    board = EventAccumulator(str(run_dir / TENSORBOARD), {"scalars": 0}).Reload()
    if name not in board.Tags()["scalars"]:
        return []
    return [(event.step, round(event.value, 5)) for event in board.Scalars(name)]


def test_metrics_and_tensorboard_hold_the_same_numbers(recorded):
    entries = read_metrics(recorded)
    assert [(e["step"], e["train/loss"]) for e in entries] == [(s, 1 / s) for s in STEPS]
    assert on_the_board(recorded) == [(s, round(1 / s, 5)) for s in STEPS]
    assert "of/one" not in entries[0] and on_the_board(recorded, "of/one") == []


@pytest.mark.parametrize("restarted", [True, False], ids=["resumed", "rolled back"])
def test_entries_after_the_restored_step_are_dropped(restarted, recorded):
    with MetricsWriter(recorded, 3 if restarted else 5) as metrics:
        metrics.rewind(3)
        metrics.write(4, {"train/loss": 9.0})
    assert steps(recorded) == [1, 2, 3, 4]
    assert on_the_board(recorded)[2:] == [(3, 0.33333), (4, 9.0)]
    assert len(list(recorded.glob(f"{METRICS}*"))) == 1


def test_a_line_that_was_not_finished_is_dropped(recorded):
    with (recorded / METRICS).open("a") as stream:
        stream.write('{"step": 6, "ti')
    assert steps(recorded) == [*STEPS]
    with MetricsWriter(recorded, 5) as metrics:
        metrics.write(6, {"train/loss": 9.0})
    assert steps(recorded) == [*STEPS, 6]
    assert len(list(recorded.glob(f"{METRICS}*"))) == 1


# If a write fails, TensorBoard's thread raises an error, and pytest warns about this error. Ignore
# the warning.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

LINES = {
    "random bytes": bytes(range(128, 256)),
    "an empty line": b"",
    "no object": b"[1, 2]",
    "no step": b'{"time": 1.0}',
    "a negative step": b'{"step": -1}',
    "an infinite step": b'{"step": 1e400}',
    "half a step": b'{"step": 1.5}',
    "a step that is true": b'{"step": true}',
    "a number of many digits": b'{"step": 1' + b"0" * 9_000 + b"}",
    "words": b'{"step": 3, "train/loss": "low"}',
    "NaN": b'{"step": 3, "train/loss": NaN}',
    "deep": b"[" * 100_000,
    "deep within": b'{"step": 3, "a": ' + b'{"b":' * 50_000,
    "cut short": b'{"step": 3, "ti',
    "a step that has grown": b'{"step": 900003, "time": 1.0}',
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("place", [0, 3, 5])
def test_damaged_lines_are_set_aside_and_writing_continues(name, place, recorded, caplog):
    path = recorded / METRICS
    lines = path.read_bytes().splitlines(keepends=True)
    lines.insert(place, LINES[name] + b"\n")
    path.write_bytes(b"".join(lines))
    damaged = path.read_bytes()
    if name != "a step that has grown":
        assert steps(recorded) == [*STEPS]
        assert "metrics.jsonl has 1 damaged lines" in caplog.text
    with MetricsWriter(recorded, 5) as metrics:
        metrics.write(6, {"train/loss": 9.0})
    assert steps(recorded) == [*STEPS, 6]
    if place == 5 and name == "a step that has grown":
        # This line is not damaged: a run that resumes from an older step finds entries of later
        # steps at the end of the file.
        return
    assert "had 1 damaged lines: it is kept as" in caplog.text
    assert "continues with the 5 whole ones" in caplog.text
    assert (recorded / f"{METRICS}.damaged_1").read_bytes() == damaged


def test_a_file_of_random_bytes_is_set_aside(tmp_path, caplog):
    content = os.urandom(50_000)
    (tmp_path / METRICS).write_bytes(content)
    assert read_metrics(tmp_path) == []
    with MetricsWriter(tmp_path, 5) as metrics:
        metrics.write(6, {"train/loss": 9.0})
    assert steps(tmp_path) == [6]
    assert (tmp_path / f"{METRICS}.damaged_1").read_bytes() == content
    (tmp_path / METRICS).write_bytes(b"\0" * 4_096)
    MetricsWriter(tmp_path, 5).close()
    assert (tmp_path / f"{METRICS}.damaged_2").read_bytes() == b"\0" * 4_096


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (os.mkfifo, "is a FIFO"),
        (os.mkdir, "is a folder"),
        (lambda p: p.symlink_to("/dev/zero"), "device"),
    ],
)
def test_a_path_that_is_not_a_regular_file_is_set_aside(make, said, tmp_path, caplog):
    make(tmp_path / METRICS)
    with pytest.raises(UserError, match=said):
        read_metrics(tmp_path)
    with MetricsWriter(tmp_path, 5) as metrics:
        metrics.write(6, {"train/loss": 9.0})
    assert steps(tmp_path) == [6]
    assert said in caplog.text and f"it is kept as {tmp_path}/{METRICS}.damaged_1" in caplog.text
    assert os.path.lexists(tmp_path / f"{METRICS}.damaged_1")


@pytest.fixture
def disk(tmp_path):
    """Mount a file system of 64 KiB, and yield its folder; skip the test if that fails."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    result = subprocess.run(mount, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {result.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Fill a disk with a new file until no byte is free, and return the file."""
    filling = disk / "filling"
    with filling.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space"):
        while True:
            stream.write(b"x" * 512)
    return filling


def test_lines_and_the_board_are_complete_after_a_full_disk(disk, caplog):
    with MetricsWriter(disk, -1) as metrics:
        metrics.write(1, {"train/loss": 1.0})
        filling = fill(disk)
        # The last block of the file has space for some lines, so write many lines.
        for step in range(2, 200):
            metrics.write(step, {"train/loss": 1 / step})
        metrics.write(200, {"train/loss": 1 / 200})
        assert steps(disk)[-1] < 200
        failures = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
        assert len(failures) == 2
        assert all("No space left on device; the run continues" in said for said in failures)
        assert METRICS in failures[0] + failures[1] and TENSORBOARD in failures[0] + failures[1]
        filling.unlink()
        metrics.write(201, {"train/loss": 1 / 201})
    assert steps(disk) == [*range(1, 202)]
    assert caplog.text.count("is written again; 0 records lost") == 2
    assert on_the_board(disk) == [(s, round(1 / s, 5)) for s in range(1, 202)]
    assert "lacks" not in caplog.text


def test_no_metrics_are_lost_if_the_disk_is_full_at_the_start(disk, caplog):
    filling = fill(disk)
    metrics = MetricsWriter(disk, -1)
    metrics.write(1, {"train/loss": 1.0})
    filling.unlink()
    metrics.write(2, {"train/loss": 0.5})
    metrics.close()
    assert steps(disk) == [1, 2]
    assert "cannot write" in caplog.text


def test_a_rollback_on_a_full_disk_writes_no_step_twice(disk):
    metrics = MetricsWriter(disk, -1)
    filling = fill(disk)
    for step in range(1, 200):
        metrics.write(step, {"train/loss": 1.0})
    metrics.rewind(190)
    metrics.write(191, {"train/loss": 2.0})
    filling.unlink()
    metrics.write(192, {"train/loss": 2.0})
    metrics.close()
    assert steps(disk) == [*range(1, 193)]


def test_lost_records_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(records, "_KEPT", 3)
    lines = MetricRecords(tmp_path / "gone" / "lines")
    for number in range(5):
        lines.append(f"{number}\n".encode())
    lines.close()
    assert f"{tmp_path}/gone/lines lacks 5 records" in caplog.text
    (tmp_path / "gone").mkdir()
    lines.append(b"5\n")
    assert (tmp_path / "gone" / "lines").read_text() == "3\n4\n5\n"
    assert "is written again; 3 records lost" in caplog.text


@pytest.mark.parametrize("then", ["removed", "replaced by a file"])
def test_a_removed_run_dir_is_logged_once_and_raises_nothing(then, tmp_path, caplog, capfd):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with MetricsWriter(run_dir, -1) as metrics:
        metrics.write(1, {"train/loss": 1.0})
        run_dir.rename(tmp_path / "elsewhere")
        if then == "replaced by a file":
            run_dir.write_text("")
        metrics.write(2, {"train/loss": 1.0})
        metrics.rewind(1)
        metrics.write(2, {"train/loss": 1.0})
    assert caplog.text.count(f"cannot write {run_dir}/{METRICS}: ") == 1
    assert "Traceback" not in capfd.readouterr().err
    assert steps(tmp_path / "elsewhere") == [1]


def test_entries_are_json_of_one_line(recorded):
    for line in (recorded / METRICS).read_text().splitlines():
        assert {"step", "time", "train/loss"} == json.loads(line).keys()
