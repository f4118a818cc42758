"""Reading and writing paths of any kind: a failure is a short error, and no call blocks."""

import os
from pathlib import PurePath

import pytest
from pydantic import BaseModel

from diffmegatron.errors import UserError
from diffmegatron.files import (
    format_path,
    read_bytes,
    read_json,
    read_text,
    shortest_ends,
    write_durably,
)


class Point(BaseModel):
    x: int
    y: float = 0.0


def test_a_file_is_read_against_its_schema(tmp_path):
    path = tmp_path / "point.json"
    path.write_text('{"x": 3}')
    assert read_json(path, Point) == Point(x=3)
    assert read_json(path, dict[str, int]) == {"x": 3}
    assert read_text(path) == '{"x": 3}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "EOF"),
        (b'{"x": "three"}', "valid integer, unable to parse string as an integer at x"),
        (b"[" * 100_000, "recursion limit"),
        (b'{"x": ' + b"[" * 100_000, "recursion limit"),
        (b'{"x": 1' + b"0" * 6_000 + b"}", "number out of range"),
        (b"\xff\xfe", "damaged"),
        (b'{"x": 1, "y": "' + b"y" * 5_000 + b'"}', "valid number"),
    ],
)
def test_the_error_of_damaged_json_is_one_short_line(tmp_path, content, said):
    path = tmp_path / "point.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match="damaged and cannot be used") as caught:
        read_json(path, Point)
    sentence = str(caught.value).removeprefix(str(path))
    assert said in sentence
    assert "\n" not in sentence
    assert len(sentence) < 400


def test_reading_a_path_that_is_not_a_file_fails_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for name, said in {
        "fifo": "a FIFO",
        ".": "a folder",
        "missing": "No such file",
        "n" * 5_000: "too long",
        "a\0b": "null (byte|character)",
    }.items():
        with pytest.raises(UserError, match=said) as caught:
            read_bytes(tmp_path / name)
        assert len(str(caught.value)) < 500 + len(str(tmp_path))
    with pytest.raises(UserError, match="a device"):
        read_bytes(tmp_path.__class__("/dev/zero"))


def test_a_file_beyond_its_limit_is_refused(tmp_path):
    path = tmp_path / "large"
    path.write_bytes(b"x" * 11)
    assert len(read_bytes(path, max_bytes=11)) == 11
    with pytest.raises(UserError, match="larger than the limit of 10 bytes"):
        read_bytes(path, max_bytes=10)
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="not UTF-8"):
        read_text(path)


def test_a_failed_write_keeps_the_old_content(tmp_path):
    path = tmp_path / "file"
    write_durably(path, b"first")
    (tmp_path / "file.tmp").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_durably(path, b"second")
    assert path.read_bytes() == b"first"


def test_a_write_that_fails_on_a_full_disk_leaves_no_file(tmp_path, monkeypatch):
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(tmp_path / "file", b"content")
    assert list(tmp_path.iterdir()) == []


def test_paths_are_shown_short_and_on_one_line(tmp_path):
    assert format_path(tmp_path / "a\nb").endswith("a\\nb")
    assert "\\udcff" in format_path(tmp_path / "x\udcff")
    assert len(format_path(tmp_path / ("n" * 5_000))) < 200


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["corpora/web", "corpora/code"], ["web", "code"]),
        (["a/web", "b/web", "c/d/code"], ["a/web", "b/web", "code"]),
        (["web", "a/web"], ["web", "a/web"]),
        (["/web", "web", "/a/code"], ["/web", "web", "code"]),
        (["/a/x", "/b/x", "a/x"], ["/a/x", "b/x", "a/x"]),
    ],
)
def test_paths_are_shortened_to_unique_ends(paths, names):
    assert shortest_ends([PurePath(path) for path in paths]) == names


def test_writing_to_a_fifo_fails_at_once(tmp_path):
    os.mkfifo(tmp_path / "file.tmp")
    with pytest.raises(OSError, match="No such device"):
        write_durably(tmp_path / "file", b"content")
    assert not (tmp_path / "file").exists()
