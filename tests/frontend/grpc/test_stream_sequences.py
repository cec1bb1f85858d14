"""What a stream remembers of the sequences it has asked for."""

from marserve.frontend.grpc.stream_sequences import StreamSequences


class Model:
    def __init__(self) -> None:
        self.open: set[str] = set()
        self.left: list[str] = []

    def has_sequence(self, sequence_id: str) -> bool:
        return sequence_id in self.open

    def leave_sequence(self, sequence_id: str) -> None:
        self.left.append(sequence_id)


def test_a_stream_that_is_broken_off_leaves_the_sequences_that_are_open() -> None:
    model, used = Model(), StreamSequences()
    model.open = {"open", "others"}
    for sequence_id in ("open", "ended", "open"):
        used.add(model, sequence_id)
    used.leave()
    assert model.left == ["open"]


def test_a_stream_that_lasts_for_days_does_not_remember_all_that_was_in_it() -> None:
    model, used = Model(), StreamSequences()
    for number in range(10_000):
        model.open.add(f"{number}")
        model.open.discard(f"{number - 100}")  # idle
        used.add(model, f"{number}")
    assert 100 <= len(used) <= 400
    used.leave()
    assert set(model.left) >= model.open
