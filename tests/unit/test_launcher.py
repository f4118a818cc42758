"""The environment that a launcher leaves, before the ranks meet."""

import pytest

from diffmegatron.errors import UserError
from diffmegatron.parallel.launcher import check_launcher, launched_rank

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "1234"}


@pytest.fixture
def environment(monkeypatch):
    def install(values):
        for name in WHOLE:
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return install


def test_with_and_without_a_launcher(environment):
    environment({})
    check_launcher()
    assert launched_rank() == 0
    environment(WHOLE)
    check_launcher()
    assert launched_rank() == 1


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"RANK": None}, "sets WORLD_SIZE and .* but not RANK"),
        ({"WORLD_SIZE": None}, "but not WORLD_SIZE"),
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "but not MASTER_ADDR and MASTER_PORT"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE 'two'"),
        ({"RANK": "2"}, "RANK '2'"),
        ({"RANK": "-1"}, "RANK '-1'"),
    ],
)
def test_half_an_environment_is_refused(changes, sentence, environment):
    values = WHOLE | changes
    environment({name: value for name, value in values.items() if value is not None})
    with pytest.raises(UserError, match=sentence):
        check_launcher()
