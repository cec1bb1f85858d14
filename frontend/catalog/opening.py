"""What keeps a server to the catalog that its configuration names."""

from pathlib import Path

from marserve.frontend.catalog.convergence import Convergence
from marserve.frontend.catalog.file_store import FileStore
from marserve.frontend.catalog.http_store import HttpStore
from marserve.frontend.catalog.store import CatalogStore
from marserve.frontend.catalog.synchroniser import READ_WRITE, CatalogOptions, Synchroniser
from marserve.frontend.configuration.config import Config
from marserve.frontend.registration.manager import ModelManager
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.telemetry.catalog_metrics import CatalogMetrics
from marserve.frontend.telemetry.metrics import Metrics


def make_synchroniser(
    config: Config, manager: ModelManager, registry: ModelRegistry, metrics: Metrics
) -> Synchroniser | None:
    """The synchroniser for ``model_catalog``; None where it is not set."""
    if config.model_catalog is None:
        return None
    options = CatalogOptions(
        config.model_catalog_mode, config.model_catalog_interval, config.model_catalog_timeout
    )
    counted = CatalogMetrics(metrics)
    convergence = Convergence(manager, registry, counted.failed)
    counted.watch_pending(lambda: len(convergence.unconverged()))
    store: CatalogStore
    place = config.model_catalog
    if "://" in place:
        store = HttpStore(place, options.timeout, may_write=options.mode == READ_WRITE)
    else:
        store = FileStore(Path(place), options.timeout)
    return Synchroniser(store, convergence, options, counted)
