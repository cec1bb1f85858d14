"""The ``models`` key of config.properties: JSON of settings per model and version."""

from fuzz.limits import Limits
from fuzz.oracles import check_refusal

from marserve.frontend.configuration.models_key import model_entries, unread_model_settings

LIMITS = Limits(calls=2_000, calls_per_byte=30)


def target(data: bytes) -> None:
    """It is read, with a sentence for what is ignored, or refused."""
    text = data.decode("utf-8", "replace")
    try:
        entries = model_entries(text)
    except ValueError as error:
        check_refusal(error)
        return
    ignored = list(unread_model_settings(text))
    read = sum(len(members) for versions in entries.values() for members in versions.values())
    assert read + len(ignored) <= text.count(":") + 1
