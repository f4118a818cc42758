"""Count, for each kind of bad path, the cases that were tried and the cases without a problem.

python -m tests.robustness.count --out docs/results/bad_paths.json
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.conftest import prepare_corpus
from tests.robustness.bad_paths import KINDS, make_inputs, places, try_kind


def count(folder: Path) -> dict[str, dict[str, int]]:
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
    with tempfile.TemporaryDirectory() as folder:
        found = count(Path(folder))
        os.chdir("/")
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
