import threading

import pytest
import torch

from marserve.handlers.inputs.request_threads import RequestThreads, chosen_threads


def test_rows_are_prepared_at_the_same_time_and_returned_in_order():
    both = threading.Barrier(2, timeout=10)

    def prepare(row):
        if row < 2:
            both.wait()
        return row * 10

    done = RequestThreads(2).run(prepare, [0, 1, 2, 3])
    assert [item.result() for item in done] == [0, 10, 20, 30]


def test_a_failure_waits_for_the_others():
    seen = []

    def prepare(row):
        seen.append(row)
        return 1 / row

    first, *others = RequestThreads(2).run(prepare, [0, 1, 2, 4])
    assert isinstance(first.exception(), ZeroDivisionError)
    assert [item.result() for item in others] == [1.0, 0.5, 0.25]
    assert sorted(seen) == [0, 1, 2, 4]


def test_threads_use_one_torch_thread_and_the_model_as_many_as_before():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        done = RequestThreads(2).run(lambda _: torch.get_num_threads(), [0, 1, 2])
        assert [item.result() for item in done] == [1, 1, 1]
        assert torch.get_num_threads() == 3
        later = []
        thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert later == [3]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("settings", "count"), [({"decode_threads": 5}, 5), ({"decode_threads": 1}, 1)]
)
@pytest.mark.parametrize("has_accelerator", [False, True])
def test_the_configured_number_of_threads(settings, count, has_accelerator):
    assert chosen_threads(settings, has_accelerator=has_accelerator) == count


@pytest.mark.parametrize("settings", [None, {}, {"profile": True}])
def test_the_default_number_of_threads_is_that_of_torch(settings, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert chosen_threads(settings, has_accelerator=True) == 7
    assert chosen_threads(settings, has_accelerator=False) == 1
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert chosen_threads(settings, has_accelerator=True) == 16


@pytest.mark.parametrize("wrong", [0, -1, "4", 2.0, True])
def test_invalid_numbers_of_threads_are_refused(wrong):
    with pytest.raises(ValueError, match=r"decode_threads=.*a number of threads"):
        chosen_threads({"decode_threads": wrong}, has_accelerator=False)
