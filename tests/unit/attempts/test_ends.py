"""The files in which ranks record how they ended."""

from diffmegatron.attempts.ends import RankRecord, end_name, read_ends


def test_a_complete_record_under_its_temporary_name_counts(tmp_path):
    for rank, status in enumerate((0, 2, 75)):
        RankRecord(tmp_path, rank).end(status)
    for rank in (1, 2):
        (tmp_path / end_name(rank)).rename(tmp_path / f"{end_name(rank)}.tmp")
    # The temporary files of ranks 3 and 4 do not count. Rank 3 also has a complete file, and rank 4
    # was killed while it wrote its file.
    RankRecord(tmp_path, 3).end(0)
    (tmp_path / f"{end_name(3)}.tmp").write_text('{"status": 9}')
    (tmp_path / f"{end_name(4)}.tmp").write_text('{"sta')
    assert {rank: end.status for rank, end in read_ends(tmp_path).items()} == {
        0: 0,
        1: 2,
        2: 75,
        3: 0,
    }
