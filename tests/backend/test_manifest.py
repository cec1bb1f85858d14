"""MANIFEST.json: what is read, what is refused and in which words, what is written."""

import json
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.backend.manifest import Manifest, ManifestError, WorkflowManifest

FULL = {
    "createdOn": "20/11/2026 21:30:00",
    "runtime": "python3",
    "model": {
        "modelName": "resnet-18",
        "serializedFile": "resnet18.pth",
        "handler": "image_classifier",
        "modelFile": "model.py",
        "modelVersion": "1.0",
        "extensions": {"team": "vision", "stage": 2},
        "requirementsFile": "requirements.txt",
        "configFile": "model-config.yaml",
    },
    "archiverVersion": "0.12.0",
}
TEXT_FIELDS = {
    ("createdOn",): "created_on",
    ("runtime",): "runtime",
    ("archiverVersion",): "archiver_version",
    ("model", "modelName"): "model_name",
    ("model", "serializedFile"): "serialized_file",
    ("model", "handler"): "handler",
    ("model", "modelFile"): "model_file",
    ("model", "modelVersion"): "model_version",
    ("model", "requirementsFile"): "requirements_file",
    ("model", "configFile"): "config_file",
    ("model", "envelope"): "envelope",
    ("model", "sourceVocab"): "source_vocab",
}


def with_field(path: tuple[str, ...], value: object) -> str:
    document = json.loads(json.dumps(FULL))
    target = document if len(path) == 1 else document[path[0]]
    target[path[-1]] = value
    return json.dumps(document)


def write_manifest(directory: Path, data: bytes) -> None:
    path = directory / "MAR-INF" / "MANIFEST.json"
    path.parent.mkdir()
    path.write_bytes(data)


@pytest.mark.parametrize(("path", "name"), TEXT_FIELDS.items())
def test_every_text_field_is_read_from_its_key(path, name):
    assert getattr(Manifest.parse(with_field(path, "some text")), name) == "some text"


@pytest.mark.parametrize(("path", "name"), TEXT_FIELDS.items())
def test_null_is_as_good_as_absent(path, name):
    assert getattr(Manifest.parse(with_field(path, None)), name) == ""


@pytest.mark.parametrize("path", TEXT_FIELDS)
@pytest.mark.parametrize("value", [True, [], {}, ["x"], "nul\0", "\ud800", float("nan")])
def test_a_wrong_type_is_refused_by_the_fields_name(path, value):
    with pytest.raises(ManifestError, match=f"field {'.'.join(path)} "):
        Manifest.parse(with_field(path, value))


@pytest.mark.parametrize("literal", ["2", "1.10", "-3", "1e5"])
def test_a_number_where_a_text_belongs_is_taken_by_its_literal(literal):
    manifest = Manifest.parse(f'{{"model": {{"modelVersion": {literal}}}}}')
    assert manifest.model_version == literal


def test_extensions_and_unknown_keys_come_through_untouched():
    manifest = Manifest.parse(with_field(("model", "colour"), {"rgb": [1, 2.5, None]}))
    assert manifest.extensions == {"team": "vision", "stage": 2}
    assert manifest.raw["model"]["colour"] == {"rgb": [1, 2.5, None]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Failed to parse signature.json."),
        ("{", "Failed to parse signature.json."),
        ("[]", "Failed to parse signature.json."),
        ("null", "Failed to parse signature.json."),
        ("[" * 100_000, "Failed to parse signature.json."),
        ("9" * 10_000, "Failed to parse signature.json."),
        ("{}", "Missing Model entry in manifest file."),
        ('{"model": null}', "Missing Model entry in manifest file."),
        ('{"model": []}', "Manifest field model must be an object."),
        ('{"model": {"extensions": 1}}', "Manifest field model.extensions must be an object."),
    ],
)
def test_what_cannot_be_read_is_refused(text, sentence):
    with pytest.raises(ManifestError) as refusal:
        Manifest.parse(text)
    assert str(refusal.value) == sentence


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["model", "runtime", "handler"]), inner)
    ),
)


@given(st.text() | JSON_VALUES.map(json.dumps))
def test_any_text_is_a_manifest_or_a_manifest_error(text):
    try:
        manifest = Manifest.parse(text)
    except ManifestError:
        return
    assert json.dumps(manifest.raw) == json.dumps(json.loads(text))


@given(name=st.text(), version=st.text(), handler=st.text(), runtime=st.sampled_from(["", "LSP"]))
def test_what_is_registered_has_a_path_that_leads_to_it(name, version, handler, runtime):
    manifest = Manifest.implied("m", "h").registered_as(name="n")
    try:
        registered = replace(manifest, model_version=version).registered_as(
            name=name, handler=handler, runtime=runtime
        )
    except ManifestError:
        return
    path = f"{quote(registered.model_name)}/{quote(registered.model_version)}"
    assert path.isascii()
    assert [unquote(each) for each in path.split("/")] == [name or "n", version or "1.0"]


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


@given(name=NAMES, version=NAMES, handler=NAMES, created_on=NAMES, weights=NAMES)
def test_what_is_written_reads_back_the_same(name, version, handler, created_on, weights):
    manifest = Manifest(
        model_name=name,
        model_version=version,
        handler=handler,
        runtime="python",
        serialized_file=weights,
        extensions={"a": [1, None]},
        created_on=created_on,
    )
    assert Manifest.parse(manifest.to_json()) == manifest


def test_written_as_the_archiver_does_indented_and_in_order():
    assert Manifest.parse(json.dumps(FULL)).to_json() == json.dumps(FULL, indent=2)


def test_an_empty_model_entry_is_still_written():
    assert json.loads(Manifest(runtime="python").to_json()) == {"runtime": "python", "model": {}}


def test_a_directory_without_manifest_has_none(tmp_path):
    assert Manifest.read(tmp_path) is None


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "byte-order-mark"])
def test_a_directory_with_manifest_is_read(tmp_path, mark):
    write_manifest(tmp_path, mark + json.dumps(FULL).encode())
    manifest = Manifest.read(tmp_path)
    assert manifest is not None
    assert (manifest.model_name, manifest.handler) == ("resnet-18", "image_classifier")


@pytest.mark.parametrize(
    ("data", "sentence"),
    [(b"\xff\xfe", "Failed to parse"), (b" " * (1 << 21), "longer than 1048576 bytes")],
    ids=["no-text", "endless"],
)
def test_a_manifest_file_that_is_none_is_refused(tmp_path, data, sentence):
    write_manifest(tmp_path, data)
    with pytest.raises(ManifestError, match=sentence):
        Manifest.read(tmp_path)


def test_an_implied_manifest_can_be_registered():
    manifest = Manifest.implied("squeezenet", "serve.py:handle")
    manifest.validate()
    assert manifest == Manifest(
        model_name="squeezenet", model_version="1.0", handler="serve.py:handle", runtime="python"
    )
    assert manifest.raw == {}


def test_a_registration_overrides_name_runtime_and_handler():
    manifest = Manifest.parse(json.dumps(FULL)).registered_as(
        name="other", runtime="python", handler="h:f", fallback_name="no", fallback_handler="no"
    )
    assert (manifest.model_name, manifest.runtime, manifest.handler) == ("other", "python", "h:f")


def test_a_registration_falls_back_only_where_the_manifest_is_silent():
    silent = Manifest.parse('{"runtime": "python", "model": {}}')
    registered = silent.registered_as(fallback_name="file", fallback_handler="h")
    assert (registered.model_name, registered.handler) == ("file", "h")
    assert registered.model_version == "1.0"
    spoken = Manifest.parse(json.dumps(FULL)).registered_as(
        fallback_name="file", fallback_handler="h"
    )
    assert (spoken.model_name, spoken.handler) == ("resnet-18", "image_classifier")


def test_the_servers_envelope_replaces_the_manifests_even_by_nothing():
    manifest = Manifest.parse(with_field(("model", "envelope"), "body"))
    assert manifest.registered_as(envelope="json").envelope == "json"
    assert manifest.registered_as().envelope == ""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"runtime": "python", "model": {}}', "Model name is not defined."),
        ('{"runtime": "java", "model": {"modelName": "m"}}', "Runtime is not defined or invalid."),
    ],
)
def test_a_registration_that_stays_incomplete_is_refused(text, sentence):
    with pytest.raises(ManifestError) as refusal:
        Manifest.parse(text).registered_as()
    assert str(refusal.value) == sentence


def test_a_missing_version_is_named_when_nobody_fills_it_in():
    with pytest.raises(ManifestError, match=r"^Model version is not defined\.$"):
        Manifest(model_name="m", runtime="python").validate()


UNADDRESSABLE = [
    "a/b",
    "m\n[METRICS]x",
    "\x1b[31m",
    "\u2028",
    "\ud800",
    ".",
    "..",
    "n" * 9000,
    "n" * 256,
    "\u00e9" * 128,
]


@pytest.mark.parametrize("name", UNADDRESSABLE)
def test_a_name_nobody_could_address_is_refused(name):
    with pytest.raises(ManifestError) as refusal:
        Manifest.implied("m", "h").registered_as(name=name)
    assert len(str(refusal.value)) < 200


@pytest.mark.parametrize("version", UNADDRESSABLE)
def test_a_version_nobody_could_address_is_refused(version):
    with pytest.raises(ManifestError):
        Manifest(model_name="m", model_version=version, runtime="python").validate()


@pytest.mark.parametrize(
    "name", ["...", "%2F", "a b", "m.v2:predict", "\u6a21\u578b", "n" * 255, "\u00e9" * 127]
)
def test_an_odd_name_that_can_be_addressed_is_registered(name):
    manifest = Manifest.implied("m", "h").registered_as(name=name)
    assert manifest.model_name == name


def test_the_runtime_of_a_workflow_is_not_read():
    manifest = WorkflowManifest.parse('{"workflow": {"workflowName": "w"}, "runtime": {}}')
    assert manifest.workflow_name == "w"
