"""Checks of model-config.yaml and workflow specifications, by the server's readers."""

from collections.abc import Iterator

from marserve.frontend.archives.contents import NOT_A_MAP
from marserve.frontend.configuration.bounded_yaml import YamlTooLarge, load_yaml
from marserve.frontend.errors import ServeError
from marserve.frontend.settings.model_yaml import check_yaml, yaml_settings
from marserve.frontend.workflows.specification import read_specification
from marserve.tools.doctor import compatibility
from marserve.tools.doctor.checks.gains import of_model_yaml, unbatched
from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding

_SECTION = "model-config.yaml"
# An upper limit: the GPUs of the target machine are unknown.
_GPUS = 1000


def check_model_yaml(
    place: Place, model: str, text: str, *, is_base_handler: bool | None = None
) -> Iterator[Finding]:
    """Check a model-config.yaml as the server reads it; the handler may be unknown."""
    try:
        parsed = load_yaml(text)
    except YamlTooLarge as error:
        yield finding("model-yaml", place, f"{place} {error}.", "Make it smaller.")
        return
    except Exception as error:  # noqa: BLE001 - the parser raises many types of errors
        why = " ".join(str(error).split())
        yield finding("model-yaml", place, f"{place} is not YAML: {why}.", "Correct it.")
        return
    if not isinstance(parsed, dict):
        if parsed is not None:
            yield finding("model-yaml-ignored", place, f"{place} {NOT_A_MAP}.")
        return
    sentences: list[str] = []
    try:
        settings = yaml_settings(parsed, _GPUS, sentences.append)
        check_yaml(parsed, settings, sentences.append)
    except ServeError as error:
        yield finding("model-yaml", place, str(error), "Correct the value.")
        return
    for sentence in sentences:
        what = sentence.removeprefix(f"{_SECTION}: ")
        yield finding("model-yaml-ignored", _at(place, text, what), what)
    if "pippy" in parsed:
        entry = compatibility.find(_SECTION, "pippy")
        why = f": {compatibility.reason(entry)}" if entry else ""
        yield finding(
            "model-yaml-ignored",
            _at(place, text, "pippy"),
            f"the section pippy is not read{why}.",
            "Use torch.distributed.pipelining in the handler, with parallelType: pp.",
        )
    if not settings.get("asynchronous") and not settings.get("continuous_batching"):
        size = 2 if settings.get("is_automatic") else settings.get("size", 1)
        workers = settings.get("min_workers", 1)
        yield from unbatched(place, model or "The model", size, workers)
    if parsed.get("optimization") and is_base_handler is False:
        yield finding(
            "model-yaml-ignored",
            _at(place, text, "optimization"),
            "optimization is applied by BaseHandler, to a model with a model file.",
            "Read it in the handler, derive this from BaseHandler, or remove the section.",
        )
    yield from of_model_yaml(
        place, model or "The model", parsed, is_base_handler=bool(is_base_handler)
    )
    yield finding("unchanged", place, f"{len(parsed)} settings of {place.name}")


def is_asynchronous(text: str) -> bool:
    """Return whether a model-config.yaml has asyncCommunication; true if it cannot be read."""
    try:
        parsed = load_yaml(text)
    except Exception:  # noqa: BLE001 - `check_model_yaml` reports it
        return True
    return isinstance(parsed, dict) and bool(parsed.get("asyncCommunication"))


def check_workflow(place: Place, text: str) -> Iterator[Finding]:
    """Check the specification of a workflow."""
    try:
        specification = read_specification(load_yaml(text))
    except ServeError as error:
        yield finding("workflow", place, str(error), "Correct the specification.")
    except Exception as error:  # noqa: BLE001 - the parser raises many types of errors
        why = " ".join(str(error).split())
        yield finding("workflow", place, f"{place} is not YAML: {why}.", "Correct it.")
    else:
        for sentence in specification.warnings:
            yield finding("model-yaml-ignored", place, sentence)
        yield finding("unchanged", place, f"the workflow of {place.name}")


def _at(place: Place, text: str, sentence: str) -> Place:
    """Return the place of the key at the start of a sentence."""
    key = sentence.split()[0].partition("=")[0].rstrip(":") if sentence.split() else ""
    lines = enumerate(text.splitlines(), 1)
    return Place(place.name, next((n for n, line in lines if key and key in line), 0))
