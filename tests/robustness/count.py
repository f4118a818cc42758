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
    """Try every place of every command with every kind, in a folder that is left full.

    Returns:
        By kind, how many were tried and how many held: the command ended well, or in one sentence
        with nothing left behind.
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
