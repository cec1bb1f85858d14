"""The models of a server's start: those of ``load_models``, or those of a snapshot.

A model that cannot be registered is logged and recorded (`FailedLoad`); the others are served.
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from marserve.backend.manifest import MANIFEST_PATH
from marserve.frontend.archives.archive import implied_model_name
from marserve.frontend.archives.local_files import has_manifest
from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.model_entry import ModelEntry
from marserve.frontend.errors import ModelNotFound, ServeError, VersionConflict
from marserve.frontend.logs.formats import one_line
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.registration.model_changes import Registration
from marserve.frontend.registration.snapshot import RestoreFailed
from marserve.frontend.serving.registry import FailedLoad
from marserve.frontend.settings.layers import SNAPSHOT

logger = logging.getLogger(__name__)

_ARCHIVE_ENDINGS = (".mar", ".model", ".tar.gz", ".tgz")


async def register_initial_models(manager: ModelManager, config: Config) -> None:
    """Register the models that the configuration names.

    Raises:
        RestoreFailed: An archive of a snapshot is missing, and the operator chose the snapshot.
    """
    if config.model_snapshot is None:
        await _load(manager, config)
    else:
        await _restore(manager, config)


async def _load(manager: ModelManager, config: Config) -> None:
    is_named = not _is_everything(config.load_models)
    for name, url in _expand(config):
        registration = Registration(url=url, name=name, synchronous=False, at_start=True)
        error = await _try_to_register(manager, registration)
        if error is None or isinstance(error, VersionConflict):  # an earlier item is served
            continue
        # Of ``all``, a directory may not be a model.
        if is_named or not (config.model_store / url).is_dir():
            implied = name or implied_model_name(url)
            manager.add_failed(FailedLoad(implied, url, one_line(error), is_name_implied=not name))


async def _restore(manager: ModelManager, config: Config) -> None:
    saved_models, defaults = config.model_snapshot or (), list[ModelEntry]()
    if not saved_models:
        logger.warning("The snapshot contains no models, so none are registered.")
    for saved in saved_models:
        registration = Registration(**vars(saved), source=SNAPSHOT, synchronous=False)
        error = await _try_to_register(manager, registration)
        if isinstance(error, ModelNotFound) and not config.is_snapshot_found:  # chosen
            which = f"model :{saved.name}, version :{saved.version}"  # as in TorchServe
            sentence = f"Model archive file for {which} not found in model store"
            raise RestoreFailed(f"{sentence}: {error}")
        if error is not None:
            manager.add_failed(
                FailedLoad(saved.name, saved.url, one_line(error), saved.version, saved)
            )
        elif saved.is_default:
            defaults.append(saved)
    for saved in defaults:
        await manager.set_default(saved.name, saved.version)


async def _try_to_register(manager: ModelManager, registration: Registration) -> Exception | None:
    try:
        await manager.register(registration)
    except Exception as error:  # archives are untrusted; the other models are served
        traceback = None if isinstance(error, ServeError | OSError) else error
        url, sentence = one_line(registration.url), one_line(error)
        logger.error("Failed to load model: %s: %s", url, sentence, exc_info=traceback)  # noqa: TRY400 - a traceback only for unexpected errors
        return error
    return None


def _is_everything(items: Sequence[str]) -> bool:
    return [item.lower() for item in items] == ["all"]


def _expand(config: Config) -> Iterator[tuple[str, str]]:
    """Yield a name, which may be empty, and a URL for each item of ``load_models``."""
    if _is_everything(config.load_models):
        if (config.model_store / MANIFEST_PATH).is_file():  # the store is a model, as on SageMaker
            yield "", str(config.model_store)
            return
        for entry in sorted(config.model_store.iterdir()):
            if not entry.name.startswith(".") and _may_be_model(entry, config):
                yield "", entry.name
        return
    for item in config.load_models:
        name, equals, url = item.partition("=")
        yield (name.strip(), url.strip()) if equals else ("", item.strip())


def _may_be_model(path: Path, config: Config) -> bool:
    if not path.is_dir():
        return path.name.endswith(_ARCHIVE_ENDINGS)
    if config.default_service_handler or has_manifest(path):
        return True
    name = one_line(path.name)
    logger.info("%s in the model store has no manifest, so it is not a model.", name)
    return False
