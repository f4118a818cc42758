"""Count the bad paths that every command was tried with, by kind.

python -m tests.robustness.count --out docs/results/bad_paths.json
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

from tests.conftest import prepare_corpus
from tests.robustness.bad_paths import KINDS, make_inputs, places, try_kind


def count(folder: Path) -> dict[str, dict[str, int]]:
    """Give every kind of bad path to every command, wherever it takes a path.

    Args:
        folder: existing folder for the files of all cases, which are not removed.

    Returns:
        For each kind, the number of cases (``tried``) and of cases without a problem (``held``):
        the command succeeded, or ended with one sentence and changed no file.
    """
    os.environ["SLURM_NTASKS"] = "1"
    (folder / "made").mkdir()
    make_inputs(folder / "made")
    corpus = prepare_corpus(folder / "corpus")
    found = {}
    for kind in KINDS:
        problems = [
            try_kind(place, kind, folder / kind.__name__ / str(number), folder / "made", corpus)
            for number, place in enumerate(places())
        ]
        name = kind.__name__.replace("_", " ")
        found[name] = {"tried": len(problems), "held": problems.count(None)}
    return found


def main() -> None:
    """Write the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        found = count(Path(folder))
        os.chdir("/")
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
