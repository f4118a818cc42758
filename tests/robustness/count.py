"""Count, for each kind of bad path or input, the cases that were tried and those that passed.

python -m tests.robustness.count --out docs/results/bad_paths.json
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import prepare_corpus
from tests.paths import ROOT
from tests.robustness.bad_paths import KINDS, make_inputs, places, try_kind

# Kinds of input that are not paths, with the tests that try them. Every test is a case.
TESTED = {
    "numbers without labels": "tests/unit/training/test_labels.py",
    "published tokenizers and templates": "tests/unit/data/prepare/test_published_templates.py",
}


class _Counter:
    """Plugin of pytest that counts tests, and those that passed."""

    def __init__(self) -> None:
        self.tried = self.held = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed:
            self.tried += 1
            self.held += report.passed


def count_tests(file: str) -> dict[str, int]:
    """Run the tests of a file, and return the same counts as :func:`count_paths`."""
    counter = _Counter()
    pytest.main(["-q", str(ROOT / file)], plugins=[counter])
    return {"tried": counter.tried, "held": counter.held}


def count_paths(folder: Path) -> dict[str, dict[str, int]]:
    """Try every kind of bad path in every place where a command accepts a path.

    Args:
        folder: existing folder for the files of all cases, which are not removed.

    Returns:
        For each kind, the number of cases (``tried``) and the number of cases in which
        :func:`try_kind` found no problem (``held``).
    """
    os.environ["SLURM_NTASKS"] = "1"
    (folder / "made").mkdir()
    make_inputs(folder / "made")
    corpus = prepare_corpus(folder / "corpus")
    found = {}
    for kind in KINDS:
        name = kind.__name__.replace("_", " ")
        found[name] = {"tried": 0, "held": 0}
        for number, place in enumerate(places()):
            case = folder / kind.__name__ / str(number)
            problem = try_kind(place, kind, case, folder / "made", corpus)
            found[name]["tried"] += 1
            found[name]["held"] += problem is None
            if problem is not None:
                print(f"{place}, {name}: {problem}", file=sys.stderr)
    return found


def main() -> None:
    """Write the counts to the file of ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.absolute()
    found = {name: count_tests(file) for name, file in TESTED.items()}
    with tempfile.TemporaryDirectory() as folder:
        forks.open_folder()
        found |= count_paths(Path(folder))
        forks.close_folder()
        os.chdir("/")
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
