"""All ranks of a run take the kernels that rank 0 has measured."""

from tests.ranks import launch


def test_ranks_with_other_measurements_choose_alike(tiny_recipe, tmp_path):
    tiny_recipe()
    output = launch(2, "tests.parallel.kernel_choice_worker", [str(tmp_path / "tiny.yaml")])
    assert output.count("attention of diff_v1: sdpa_4call") == 1
    for rank in (0, 1):
        assert f"rank {rank} has sdpa_4call" in output
