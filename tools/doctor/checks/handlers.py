"""Checks of Python files: imports, and the entry point of handlers. No code of them runs."""

import ast
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import ts
from marserve.tools.doctor import compatibility
from marserve.tools.doctor.findings import Finding, Place
from marserve.tools.doctor.rules import finding

_OURS = ("ts", "model_archiver", "workflow_archiver")
_SECTION = "Import names"
_OF_PACKAGES = ("*", "version", "__version__")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_FALLBACKS = ("ImportError", "ModuleNotFoundError", "Exception")
#: Distributions of import names with another name.
_DISTRIBUTIONS = {
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python opencv-python-headless opencv-contrib-python",
    "dateutil": "python-dateutil",
    "google": "protobuf googleapis-common-protos google-cloud-storage",
    "intel_extension_for_pytorch": "intel-extension-for-pytorch",
    "sentence_transformers": "sentence-transformers",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "torch_tensorrt": "torch-tensorrt",
    "yaml": "pyyaml",
}
_GIVEN_UP = {
    "torchtext": "it works with torch up to 2.3 only; tokenize with transformers or in the handler",
    "pippy": "use torch.distributed.pipelining",
    "mms": "it is Multi Model Server; import ts instead",
}


@dataclass(frozen=True)
class Import:
    """A module that a file imports, with the imported names."""

    module: str
    names: tuple[str, ...]
    line: int
    is_guarded: bool  # whether its absence does not prevent the import of the file


class PythonFile:
    """A parsed file.

    Raises:
        SyntaxError: The text is not Python of this version.
    """

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        try:
            self.tree = ast.parse(text, name)
            self.imports = list(_imports(self.tree.body, is_guarded=False))
        except ValueError as error:  # a zero byte
            raise SyntaxError(str(error)) from error
        except (RecursionError, MemoryError) as error:  # raised by the parser for deep nesting
            raise SyntaxError("it is nested too deeply") from error

    @property
    def classes(self) -> list[ast.ClassDef]:
        """The classes defined at its top level."""
        return [node for node in self.tree.body if isinstance(node, ast.ClassDef)]

    @property
    def names(self) -> set[str]:
        """The names of possible entry points, at any depth."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.Assign):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found

    @property
    def top_level(self) -> set[str]:
        """The names bound at its top level: functions, classes, imports and values."""
        return _top_level(self.tree.body)


def parse_files(
    prefix: str, texts: Mapping[str, str]
) -> tuple[dict[str, PythonFile], list[Finding]]:
    """Return the parsed Python files by name, and findings about files and imports."""
    parsed: dict[str, PythonFile] = {}
    found = []
    for name in (each for each in texts if each.endswith(".py")):
        full = f"{prefix}{name}"
        try:
            parsed[name] = PythonFile(full, texts[name])
        except SyntaxError as error:
            what, place = f"{full} is not Python of this version: {error.msg}.", error.lineno or 0
            do = "Correct it; Python 2 is not supported."
            found.append(finding("handler-syntax", Place(full, place), what, do))
        else:
            found += check_imports(parsed[name])
    return parsed, found


def check_imports(file: PythonFile) -> Iterator[Finding]:
    """Check imports of TorchServe's modules, and of abandoned packages."""
    for item in file.imports:
        place, top = Place(file.name, item.line), item.module.partition(".")[0]
        if top in _GIVEN_UP and not item.is_guarded:
            yield finding(
                "handler-old", place, f"{top} is no longer maintained.", f"{top}: {_GIVEN_UP[top]}."
            )
        if top not in _OURS or item.is_guarded:
            continue
        for module, names in _modules(item):
            yield from _served(place, module, names)


def check_requirements_of(
    file: PythonFile, modules: Collection[str], required: Collection[str]
) -> Iterator[Finding]:
    """Report imports that are neither installed nor required.

    Args:
        file: A file of an archive.
        modules: Modules in the archive.
        required: Distributions that the archive requires or the image installs.
    """
    seen = set()
    for item in file.imports:
        top = item.module.partition(".")[0]
        is_known = top in modules or top in sys.stdlib_module_names or top in _OURS
        if item.is_guarded or is_known or top in seen or top in _GIVEN_UP:
            continue
        seen.add(top)
        if not is_installed(top) and not _is_required(top, required):
            yield finding(
                "handler-requirement",
                Place(file.name, item.line),
                f"{top} is imported but neither installed here nor required.",
                "Install it where the server runs, or add it to the archive's requirements.txt "
                "with install_py_dep_per_model=true.",
            )


def check_entry(file: PythonFile, function: str) -> Iterator[Finding]:
    """Check that a handler file contains an entry point: a function or exactly one class."""
    names = file.names
    if (function or "handle") in file.top_level or (function and function in names):
        return
    count = len(file.classes)
    if count == 1:
        return
    has = "no class" if not count else f"{count} classes"
    yield finding(
        "handler-class",
        Place(file.name),
        f"{file.name} has no function {function or 'handle'} and {has}; it needs the function or "
        "exactly one class, as on TorchServe.",
        f"Name the class: --handler {Path(file.name).name}:CLASS" if count
        else "Add def handle(data, context).",
    )  # fmt: skip


def coroutine_in(file: PythonFile, function: str) -> bool:
    """Return whether its entry point is a coroutine."""
    named = {node.name: node for node in file.tree.body if isinstance(node, _DEFINITIONS)}
    entry = named.get(function or "handle")
    if entry is None and len(file.classes) == 1:
        (entry,) = file.classes
    if isinstance(entry, ast.ClassDef):
        methods = (node for node in entry.body if isinstance(node, _DEFINITIONS))
        entry = next((node for node in methods if node.name == "handle"), None)
    return isinstance(entry, ast.AsyncFunctionDef)


def base_handler_in(file: PythonFile) -> bool:
    """Return whether its class is derived from a built-in handler."""
    taken = {
        name
        for item in file.imports
        if item.module.startswith("ts.torch_handler")
        for name in item.names
    }
    bases = (base for each in file.classes for base in each.bases)
    return any(isinstance(base, ast.Name) and base.id in taken for base in bases)


@lru_cache(maxsize=1000)
def is_installed(module: str) -> bool:
    """Return whether a top-level module is installed, without importing it."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def built_in_handler(name: str) -> bool:
    """Return whether a name is that of a built-in handler."""
    return bool(ts.target_of(f"ts.torch_handler.{name.partition(':')[0].removesuffix('.py')}"))


def _is_required(top: str, required: Collection[str]) -> bool:
    names = _DISTRIBUTIONS.get(top, top).lower().replace("_", "-").split()
    return any(name in required for name in names)


def _modules(item: Import) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return the modules of an import: ``from ts.x import y`` may import the module ts.x.y."""
    inner = [f"{item.module}.{name}" for name in item.names]
    served = [name for name in inner if ts.is_served(name)]
    for name in served:
        yield name, ()
    rest = tuple(name for name, full in zip(item.names, inner, strict=True) if full not in served)
    if rest or not item.names:
        yield item.module, rest


def _served(place: Place, module: str, names: tuple[str, ...]) -> Iterator[Finding]:
    if not ts.is_served(module):
        yield _not_served(place, module)
        return
    if target := ts.target_of(module):
        known = _names_of(target)
        missing = [name for name in names if known and name not in known and name != "*"]
        if missing:
            what = f"{module} has no {', '.join(missing)} here."
            yield finding("handler-import", place, what, "Implement it in the handler.")
    else:  # a package, which contains modules
        for name in names:
            if name not in _OF_PACKAGES:
                yield _not_served(place, f"{module}.{name}")


def _not_served(place: Place, module: str) -> Finding:
    entry = compatibility.find(_SECTION, module)
    why = ts.refusal(module) or (compatibility.reason(entry) if entry else "")
    do = "Change the handler." if why else "Implement its function in the handler."
    return finding(
        "handler-import", place, f"{module} is not served{f': {why}' if why else ''}.", do
    )


@lru_cache(maxsize=100)
def _names_of(module: str) -> frozenset[str]:
    """Return the top-level names of a module of marserve; empty if unknown."""
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        return frozenset()
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    names = _top_level(tree.body)
    if "__getattr__" in names:  # its names are string constants of the module
        constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        names |= {value for value in constants if isinstance(value, str)}
    return frozenset() if "*" in names else frozenset(names)


def _top_level(body: list[ast.stmt]) -> set[str]:
    found: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
            case ast.Assign():
                targets = [leaf for target in node.targets for leaf in ast.walk(target)]
                found |= {leaf.id for leaf in targets if isinstance(leaf, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.If() | ast.Try() | ast.With():
                for part in ("body", "orelse", "finalbody"):
                    found |= _top_level(getattr(node, part, []))
                for handler in getattr(node, "handlers", []):
                    found |= _top_level(handler.body)
    return found


def _imports(body: list[ast.stmt], *, is_guarded: bool) -> Iterator[Import]:
    for node in body:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, (), node.lineno, is_guarded)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                taken = tuple(alias.name for alias in names)
                yield Import(module, taken, node.lineno, is_guarded)
            case ast.Try():
                caught = any(_catches(handler) for handler in node.handlers)
                yield from _imports(node.body, is_guarded=is_guarded or caught)
                for handler in node.handlers:
                    yield from _imports(handler.body, is_guarded=True)
                yield from _imports([*node.orelse, *node.finalbody], is_guarded=is_guarded)
            case ast.If() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _imports(node.body, is_guarded=True)
                yield from _imports(getattr(node, "orelse", []), is_guarded=True)
            case ast.With() | ast.ClassDef():
                yield from _imports(node.body, is_guarded=is_guarded)


def _catches(handler: ast.ExceptHandler) -> bool:
    text = "" if handler.type is None else ast.unparse(handler.type)
    return not text or any(re.search(rf"\b{name}\b", text) for name in _FALLBACKS)
