"""``model_snapshot`` of a snapshot: the models to serve again."""

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.configuration.saved_models import saved_models, snapshot_json

LIMITS = Limits(calls=3_000, calls_per_byte=60)


def target(data: bytes) -> None:
    """What was read is written so that it is read as the same; else it is refused."""
    try:
        models = saved_models(data.decode("utf-8", "replace"))
    except ValueError as error:
        check_refusal(error)
        return
    written = snapshot_json("name.cfg", 1, models)
    again = saved_models(written)
    assert saved_models(snapshot_json("name.cfg", 1, again)) == again
    assert [(model.name, model.version, model.url) for model in again] == [
        (model.name, model.version, model.url) for model in models
    ]
