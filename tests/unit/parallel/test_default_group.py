"""The default process group of a process without a launcher: its effect on tracebacks."""

import sys

import pytest

from diffmegatron.parallel.default_group import default_group


def test_a_traceback_names_its_rank_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hook(*_: object) -> None:
        print("mine", file=sys.stderr)

    monkeypatch.setattr(sys, "excepthook", hook)
    with pytest.raises(ValueError, match="caught"), default_group():
        raise ValueError("caught")
    with default_group():
        pass
    sys.excepthook(ValueError, ValueError("boom"), None)
    assert capsys.readouterr().err == "[rank0]: mine\n"
