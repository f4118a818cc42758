"""Tests of the fault trials that ``tools/campaigns/faults.py --long`` runs.

Every class of faults is tried twice and must be survived. If the program's checks for damage are
disabled, the trials must report faults that were not survived.
"""

from diffmegatron.checkpoint.tensor_file import TensorFile
from tests.conftest import TINY
from tools.campaigns import fault_trials
from tools.campaigns.fault_trials import run_trials


def few(monkeypatch, *names: str) -> None:
    wanted = [each for each in fault_trials.CLASSES if not names or each.name in names]
    monkeypatch.setattr(fault_trials, "CLASSES", [each._replace(tried=2) for each in wanted])


def test_every_class_of_faults_is_survived(tmp_path, monkeypatch):
    few(monkeypatch)
    report = run_trials(tmp_path, TINY.format(run_dir="run", corpus="corpus"), seed=1)
    assert len(report) == len(fault_trials.CLASSES)
    assert all(each == {"tried": 2, "survived": 2} for each in report.values()), report


def test_failed_trials_are_not_counted_as_survived(tmp_path, monkeypatch):
    few(monkeypatch, "checkpoint: not finite, good checksums", "checkpoint: missing file")
    monkeypatch.setattr(TensorFile, "check_content", lambda *_: None)
    monkeypatch.setattr("diffmegatron.checkpoint.checkpoint_manifest._check_files", lambda *_: None)
    report = run_trials(tmp_path, TINY.format(run_dir="run", corpus="corpus"), seed=1)
    assert report["checkpoint: not finite, good checksums"] == {"tried": 2, "survived": 0}
    assert report["checkpoint: missing file"]["tried"] == 2
