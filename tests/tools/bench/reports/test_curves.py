from measurements import REFUSED, run, session, sweep

from marserve.tools.bench.measurement import Point
from marserve.tools.bench.reports.curves import Curve, Place, curves
from marserve.tools.bench.reports.summary import summarise


def curves_of(*points: Point) -> list[Curve]:
    return curves(summarise(session(*map(run, points))))


def test_a_sweep_over_load_gives_a_curve_for_every_setting():
    found = curves(summarise(sweep()))
    assert [(item.label, item.along) for item in found] == [
        ("batch size 1", "clients"),
        ("batch size 8", "clients"),
    ]
    assert [place.label for place in found[0].places] == ["1", "4", "16"]


def test_a_place_is_the_median_of_its_runs():
    point = Point(clients=3)
    runs = [run(point, [latency] * 4) for latency in (5, 1, 9)]
    (curve,) = curves(summarise(session(*runs)))
    assert curve.places == [Place("3", 2, 5, 5)]


def test_clients_that_grow_with_the_batches_are_one_curve():
    found = curves_of(*(Point(clients=2 * size, batch_size=size) for size in (1, 2, 4)))
    assert [(item.along, len(item.places)) for item in found] == [("batch size", 3)]


def test_a_curve_never_returns_to_a_value_it_had():
    found = curves_of(*(Point(clients=n, batch_size=b) for n in (1, 2, 4) for b in (1, 2)))
    assert [(item.label, len(item.places)) for item in found] == [
        ("batch size 1", 3),
        ("batch size 2", 3),
    ]


def test_without_a_change_of_load_the_settings_are_the_curve():
    (found,) = curves_of(*(Point(clients=8, workers=count) for count in (1, 2, 3)))
    assert (found.label, found.along) == ("", "workers")


def test_what_failed_is_on_no_curve():
    assert curves(summarise(session(REFUSED))) == []
    (found,) = curves(summarise(session(run(Point(clients=1)), REFUSED)))
    assert len(found.places) == 1
