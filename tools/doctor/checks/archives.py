"""Checks of archives: manifest, files, handler, requirements, model-config.yaml."""

from collections.abc import Iterator
from pathlib import PurePosixPath

from marserve.backend.manifest import (
    MANIFEST_PATH,
    WORKFLOW_MANIFEST_PATH,
    Manifest,
    ManifestError,
    WorkflowManifest,
)
from marserve.tools.doctor.checks.handlers import (
    base_handler_in,
    built_in_handler,
    check_entry,
    check_requirements_of,
    coroutine_in,
    parse_files,
)
from marserve.tools.doctor.checks.model_yaml import (
    check_model_yaml,
    check_workflow,
    is_asynchronous,
)
from marserve.tools.doctor.contents import Contents, NotAnArchive, read_contents
from marserve.tools.doctor.findings import Finding, Level, Place
from marserve.tools.doctor.rules import finding
from marserve.tools.doctor.sources import Source
from marserve.tools.doctor.surroundings import Surroundings, package_name

_TORCHSERVES = ("torchserve", "torchserve-nightly", "ts")
_LSP = "LSP"
_COROUTINES = ("vllm_handler", "trt_llm_handler")  # of the built-in handlers


def check_archive(source: Source, around: Surroundings) -> Iterator[Finding]:
    """Check a packed or unpacked archive."""
    place = Place(source.name)
    try:
        contents = read_contents(source.path)
    except NotAnArchive as error:
        if error.is_unrelated and source.path.parent != around.root:
            return
        yield finding(
            "archive-unusable",
            place,
            f"{source.name} cannot be opened: {error}.",
            "Pack it again.",
        )
        return
    if contents.cut:
        yield finding(
            "not-read",
            place,
            f"{source.name} was not read completely: {contents.cut}.",
            "Examine the directory that it was packed from, or use --load.",
        )
        return
    if WORKFLOW_MANIFEST_PATH in contents.names:
        yield from _workflow(source, contents)
        return
    try:
        manifest = _manifest(contents)
    except ManifestError as error:
        yield finding("archive-unusable", place, str(error), "Pack it again.")
        return
    if manifest is None:
        yield from _without_manifest(source, around)
        return
    found = [*_manifest_findings(place, manifest, contents)]
    found += _handler(source, manifest, contents, around)
    if manifest.config_file and (text := contents.texts.get(manifest.config_file)) is not None:
        where = Place(f"{source.name}/{manifest.config_file}")
        found += check_model_yaml(
            where, manifest.model_name, text, is_base_handler=_is_base(manifest, contents)
        )
    yield from found
    if not any(each.level is Level.BLOCKS for each in found):
        yield finding("unchanged", place, f"the archive {source.name} ({_about(manifest)})")


def _manifest(contents: Contents) -> Manifest | None:
    text = contents.texts.get(MANIFEST_PATH)
    return None if text is None else Manifest.parse(text)


def _without_manifest(source: Source, around: Surroundings) -> Iterator[Finding]:
    """Check an archive without manifest, as on SageMaker; a tar may be unrelated."""
    if named := around.near(around.default_handlers, source):
        what = f"the archive {source.name} (without a manifest, served by {named[0]})"
        yield finding("unchanged", Place(source.name), what)
    elif source.path.suffix in (".mar", ".war"):
        yield finding(
            "archive-unusable",
            Place(source.name),
            f"{source.name} has no {MANIFEST_PATH}; it needs default_service_handler, or the "
            "parameter handler of the registration.",
            "Pack it again with torch-model-archiver.",
        )


def _about(manifest: Manifest) -> str:
    return f"{manifest.model_name or 'no name'} {manifest.model_version}, {manifest.handler}"


def _manifest_findings(place: Place, manifest: Manifest, contents: Contents) -> Iterator[Finding]:
    if manifest.runtime == _LSP:
        yield finding(
            "runtime",
            place,
            f"{manifest.model_name} is for TorchServe's C++ backend (runtime LSP).",
            "Serve it with a handler in Python: base_handler loads TorchScript.",
        )
    else:
        try:
            manifest.registered_as(fallback_name="model").validate()
        except ManifestError as error:
            yield finding("archive-unusable", place, str(error), "Pack it again.")
    files = {
        "serializedFile": manifest.serialized_file,
        "modelFile": manifest.model_file,
        "configFile": manifest.config_file,
        "requirementsFile": manifest.requirements_file,
    }
    for key, name in files.items():
        if name and not contents.has(str(PurePosixPath(name))):
            yield finding(
                "archive-file",
                place,
                f"{key} names {name}, which is not in the archive.",
                "Pack it again with the file.",
            )


def _handler(
    source: Source, manifest: Manifest, contents: Contents, around: Surroundings
) -> Iterator[Finding]:
    if manifest.runtime == _LSP:
        return
    required, found = _requirements(source, manifest, contents, around)
    yield from found
    modules = {PurePosixPath(name).parts[0].removesuffix(".py") for name in contents.names}
    parsed, wrong = parse_files(f"{source.name}/", contents.texts)
    yield from wrong
    module, _, function = manifest.handler.partition(":")
    file = PurePosixPath(module.removesuffix(".py") + ".py").name if module else ""
    for name in sorted({file, manifest.model_file} & parsed.keys()):
        yield from check_requirements_of(parsed[name], modules, required)
    is_coroutine = file not in contents.names and module.removesuffix(".py") in _COROUTINES
    if file in parsed:
        yield from check_entry(parsed[file], function)
        is_coroutine = coroutine_in(parsed[file], function)
    if is_coroutine and not is_asynchronous(contents.texts.get(manifest.config_file, "")):
        yield finding(
            "handler-coroutine",
            Place(source.name),
            f"The handler {manifest.handler} is a coroutine, which needs asyncCommunication: true.",
            "Add it to model-config.yaml.",
        )
    if file not in contents.names and module and not built_in_handler(module):
        yield finding(
            "handler-name",
            Place(source.name),
            f"The handler {manifest.handler} is neither in the archive nor in marserve.",
            "Pack it again with --handler FILE, or use a built-in one.",
        )


def _is_base(manifest: Manifest, contents: Contents) -> bool:
    """Return whether the handler reads `optimization`: a built-in one, or derived from one."""
    module = manifest.handler.partition(":")[0].removesuffix(".py")
    name = f"{module}.py"
    if not manifest.model_file:
        return False  # traced and exported models keep their precision
    if name not in contents.texts:
        return built_in_handler(module)
    parsed, _ = parse_files("", {name: contents.texts[name]})
    return name in parsed and base_handler_in(parsed[name])


def _requirements(
    source: Source, manifest: Manifest, contents: Contents, around: Surroundings
) -> tuple[set[str], list[Finding]]:
    """Return the packages of the archive and the image, and findings about the file."""
    found = []
    text = contents.texts.get(manifest.requirements_file, "") if manifest.requirements_file else ""
    names = [package_name(line) for line in text.splitlines()]
    place = Place(f"{source.name}/{manifest.requirements_file}")
    for number, name in enumerate(names, 1):
        if name in _TORCHSERVES:
            found.append(
                finding(
                    "ts-in-requirements",
                    Place(place.name, number),
                    f"{name} would be installed for the model. Its ts hides marserve's, and the "
                    "worker does not start.",
                    "Remove the line and pack the archive again.",
                )
            )
    is_off = around.configurations and not around.near(around.installing, source)
    if any(names) and is_off:
        found.append(
            finding(
                "requirements-off",
                place,
                f"{source.name} has requirements, and no configuration sets "
                "install_py_dep_per_model=true: they are not installed, as on TorchServe.",
                "Set it, or install them where the server runs.",
            )
        )
    return {*filter(None, names), *around.near(around.packages, source)}, found


def _workflow(source: Source, contents: Contents) -> Iterator[Finding]:
    place = Place(source.name)
    try:
        manifest = WorkflowManifest.parse(contents.texts[WORKFLOW_MANIFEST_PATH])
    except (ManifestError, KeyError) as error:
        yield finding("archive-unusable", place, str(error), "Pack it again.")
        return
    text = contents.texts.get(manifest.specification_file)
    if text is None:
        yield finding(
            "archive-file",
            place,
            f"specFile names {manifest.specification_file}, which does not exist.",
            "Pack it again.",
        )
    else:
        yield from check_workflow(Place(f"{source.name}/{manifest.specification_file}"), text)
    yield from parse_files(f"{source.name}/", contents.texts)[1]
