"""Tests of context parallelism with 32,768 tokens on four ranks: loss, gradient and memory."""

import json

import pytest

from tests.ranks import launch

SHORT, LONG = 8192, 32768


def measured(ranks: int, communication: str, *sequences: str) -> list[dict[str, float]]:
    """Return the output of ``long_context_worker`` for sequences of these lengths (in tokens)."""
    output = launch(ranks, "tests.parallel.long_context_worker", [communication, *sequences])
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, float]:
    return measured(1, "ring", str(SHORT))[0]


@pytest.fixture(scope="module")
def four_ranks() -> list[dict[str, float]]:
    return measured(4, "ring", str(SHORT), str(LONG))


def test_four_ranks_compute_the_same_loss_and_norm_as_one(one_rank, four_ranks):
    for name in ("loss", "gradient_norm"):
        assert four_ranks[0][name] == pytest.approx(one_rank[name], rel=1e-5)


def test_memory_falls_as_one_over_the_ranks(one_rank, four_ranks):
    assert four_ranks[0]["peak_mib"] < one_rank["peak_mib"] / 4 * 1.25


def test_a_step_with_32k_tokens_runs_in_linear_memory(four_ranks):
    short, long = four_ranks
    # The loss of an untrained network over 320 token ids is about ln 320 = 5.77.
    assert long["loss"] == pytest.approx(5.77, abs=0.3)
    assert long["gradient_norm"] > 0
    assert long["peak_mib"] < short["peak_mib"] * LONG / SHORT * 1.25
