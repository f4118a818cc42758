"""CPU seconds of a run of pytest by file, fixture and cause: ``make test-profile``.

``process.py`` records what each Python process does, ``plugin.py`` what each test and fixture
costs, ``summary.py`` adds the records up, and ``__main__.py`` runs pytest with them and writes
docs/results/tests.json and docs/results/tests.md.
"""
