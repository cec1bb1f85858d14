"""Three servers and one catalog: what is changed on one, or in the file, all of them follow."""

import contextlib
import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ECHO = "def handle(d, c):\n    return d and [{text!r}] * len(d)\n"
BROKEN = "def handle(d, c):\n    raise RuntimeError('no weights')\nhandle(None, None)\n"


def write(path: Path, models: dict) -> None:
    """Replace the catalog at once."""
    new = path.with_name("new")
    new.write_text(json.dumps({"models": models}))
    new.replace(path)


def read(path: Path) -> dict:
    return json.loads(path.read_text())["models"]


def status(server) -> dict:
    return server.management("GET", "/catalog").json()


def versions(server, name: str) -> dict[str, bool]:
    """The versions of a model that a server has, and which is the default one."""
    answer = server.management("GET", f"/models/{name}/all")
    if answer.status_code == 404:
        return {}
    default = server.describe(name)["modelVersion"]
    return {
        each["modelVersion"]: each["modelVersion"] == default
        for each in answer.json()
        if each["workers"]
    }


class Replicas(list):
    """Servers of one catalog, with archives that all of them have."""

    def __init__(self, store: Path, catalog: Path, servers, make_archive) -> None:
        super().__init__(servers)
        self.store, self.catalog = store, catalog
        self._make_archive = make_archive

    def pack(self, name: str, version: str = "1.0", handler: str = "", config: str = "") -> str:
        """An archive that answers with its own name; returns its file name."""
        text = f"{name} {version}"
        handler = handler or ECHO.format(text=text)
        file = f"{name}-{version}"
        self._make_archive(self.store, handler, file, config, version=version)
        return f"{file}.mar"

    def wait_served(self, wait_for, name: str, text: str) -> None:
        for server in self:
            wait_for(
                lambda server=server: server.predict(name).text == text,
                what=lambda server=server: f"{status(server)} {server.predict(name).text}",
            )

    def wait_gone(self, wait_for, name: str) -> None:
        for server in self:
            wait_for(lambda server=server: not server.is_known(name))


@pytest.fixture
def replicas(prepare_server, make_archive, tmp_path):
    """Make so many servers of one catalog and start them."""
    store = tmp_path / "shared-store"
    store.mkdir()
    catalog = tmp_path / "catalog" / "catalog.json"
    catalog.parent.mkdir()
    write(catalog, {})
    with contextlib.ExitStack() as stack:

        def start(count: int = 3, **properties: str) -> Replicas:
            settings = {
                "model_catalog": str(catalog),
                "model_catalog_interval": "0.2",
                "model_store": str(store),
                **properties,
            }
            servers = [stack.enter_context(prepare_server(**settings)) for _ in range(count)]
            for server in servers:
                server.launch()
            for server in servers:
                server.wait_ready()
            return Replicas(store, catalog, servers, make_archive)

        yield start


def test_a_registration_on_one_replica_reaches_all(replicas, wait_for):
    all_three = replicas()
    first, second, third = all_three
    answer = first.register(all_three.pack("digits"), model_name="digits", initial_workers=1)
    assert answer.status_code == 200, answer.text
    assert first.predict("digits").text == "digits 1.0"
    all_three.wait_served(wait_for, "digits", "digits 1.0")

    # A new version beside it, made the default one by another replica
    url = all_three.pack("digits", "2.0")
    answer = second.register(url, model_name="digits", initial_workers=1, batch_size=4)
    assert answer.status_code == 200, answer.text
    for server in all_three:
        wait_for(lambda server=server: versions(server, "digits") == {"1.0": True, "2.0": False})
    third.management("PUT", "/models/digits/2.0/set-default")
    all_three.wait_served(wait_for, "digits", "digits 2.0")
    assert all(server.describe("digits")["batchSize"] == 4 for server in all_three)

    # Scaled and set on any of them
    answer = first.management("PUT", "/models/digits?min_worker=2&synchronous=true")
    assert (answer.status_code, len(first.describe("digits")["workers"])) == (200, 2), answer.text
    answer = second.management("PUT", "/models/digits?batch_size=8")
    assert answer.status_code == 200, answer.text
    for server in all_three:
        wait_for(lambda server=server: len(server.describe("digits")["workers"]) == 2)
        wait_for(lambda server=server: server.describe("digits")["batchSize"] == 8)
    entry = {"url": url, "defaultVersion": True, "minWorkers": 2, "maxWorkers": 2, "batchSize": 8}
    assert read(all_three.catalog)["digits"]["2.0"] == entry

    # And gone from all
    assert third.management("DELETE", "/models/digits/2.0").status_code == 403  # the default one
    assert third.management("DELETE", "/models/digits/1.0").status_code == 200
    assert first.management("DELETE", "/models/digits").status_code == 200
    all_three.wait_gone(wait_for, "digits")
    assert read(all_three.catalog) == {}
    assert first.management("DELETE", "/models/digits").status_code == 404
    for server in all_three:
        server.stop()
