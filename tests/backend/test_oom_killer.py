from pathlib import Path

from marserve.backend.oom_killer import as_first_choice


def test_the_score_is_higher_within_the_block_only(tmp_path: Path) -> None:
    score = tmp_path / "oom_score_adj"
    for before, within in ((0, "500"), (-100, "400"), (999, "1000")):
        score.write_text(f"{before}\n")
        with as_first_choice(score):
            assert score.read_text() == within
        assert int(score.read_text()) == before


def test_without_a_score_the_block_runs_all_the_same(tmp_path: Path) -> None:
    with as_first_choice(tmp_path / "none"):
        pass
    assert not list(tmp_path.iterdir())


def test_the_kernel_lets_a_process_lower_what_it_has_raised() -> None:
    score = Path("/proc/self/oom_score_adj")
    before = int(score.read_text())
    with as_first_choice():
        assert int(score.read_text()) == min(before + 500, 1000)
    assert int(score.read_text()) == before
