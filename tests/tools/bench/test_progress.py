"""How far it is."""

import sys

import pytest
from measurements import run

from marserve.tools.bench.generator.load import Load
from marserve.tools.bench.measurement import Measurement, Point
from marserve.tools.bench.progress import Bar, Lines, Progress, progress

POINT = Point(clients=4, batch_size=2)
DONE = Measurement(point=POINT, seconds=2, answers=1, latencies_ms=[1.0], errors={"503": 3})


def tell(news: Progress) -> None:
    for _ in range(2):
        news.begin(POINT, Load(clients=4, seconds=2, warm_up=1))
        news.count(10)
        news.end(DONE)
    news.close()


def test_a_line_per_run(capsys):
    tell(Lines(2))
    output = capsys.readouterr()
    assert output.out == ""
    first, second = output.err.splitlines()
    assert first.startswith("1/2  4 clients, batch size 2: 0.5 answers/s, failed: 503 (3)")
    assert second.startswith("2/2  ")


def test_silence(capsys):
    tell(progress(2, is_wanted=False))
    assert capsys.readouterr() == ("", "")


def test_a_line_says_how_many_answers_were_in_time(capsys):
    news = Lines(1)
    news.begin(POINT, Load(clients=4, seconds=2))
    news.end(run(latencies_ms=[10, 20, 60], goal_ms=50, refused=1))
    assert capsys.readouterr().err.endswith(": 1.5 answers/s, 50.0% in time, 1 refused\n")


def test_no_bar_without_a_terminal(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert isinstance(progress(2, is_wanted=True), Lines)


def test_no_bar_without_tqdm(monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert isinstance(progress(2, is_wanted=True), Lines)


@pytest.mark.parametrize("load", [Load(clients=1, requests=50), Load(clients=1, seconds=9)])
def test_a_bar_never_runs_over(load):
    tqdm = pytest.importorskip("tqdm").tqdm
    bars = []

    def make(*arguments, **options):
        bars.append(tqdm(*arguments, **options))
        return bars[-1]

    news = Bar(1, make)
    news.begin(POINT, load)
    for count in (0, 20, 50, 80):
        news.count(count)
        assert 0 <= bars[0].n <= bars[0].total
    news.end(DONE)
    assert bars[0].disable
