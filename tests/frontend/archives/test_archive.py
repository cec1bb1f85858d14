"""From a registration's url to a model directory, over a real HTTP server where need be."""

import asyncio
import contextlib
import io
import re
import tarfile
import threading
import zipfile
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from marserve.frontend.aio.background import Slots
from marserve.frontend.archives.archive import (
    Archive,
    ArchiveOpener,
    implied_model_name,
)
from marserve.frontend.archives.helper_process import HelperProcesses
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.configuration.config import Config
from marserve.frontend.errors import (
    ArchiveRefused,
    DownloadFailed,
    ModelNotFound,
    ServeError,
)


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def tgz_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


LIMITS = ArchiveLimits()
MAR = zip_of({"handler.py": b"x = 1\n", "MAR-INF/MANIFEST.json": b'{"model": {}}'})


@dataclass(frozen=True)
class Opener:
    """A model store and a work directory."""

    store: Path
    workdir: Path
    allowed_urls: tuple[str, ...] = ("file://.*|http(s)?://.*",)
    limits: ArchiveLimits = LIMITS

    def open(self, url: str, **options: bool) -> Archive:
        return asyncio.run(self.opening(url, **options))

    async def opening(self, url: str, **options: bool) -> Archive:
        return await self.archives().open(url, **options)

    def archives(self) -> ArchiveOpener:
        patterns = tuple(re.compile(pattern) for pattern in self.allowed_urls)
        config = Config(model_store=self.store, allowed_urls=patterns)
        helpers = HelperProcesses(Slots(2, "helpers"), timeout=60, stall=20)
        return ArchiveOpener(config, self.workdir, helpers, self.limits)

    def fails(self, url: str, kind: type[ServeError], **options: bool) -> str:
        """The sentence of a failure, once nothing has been left behind."""
        before = self.everything()
        with pytest.raises(kind) as failure:
            self.open(url, **options)
        assert self.everything() == before
        return str(failure.value)

    def everything(self) -> set[Path]:
        """All files, without the empty directories of unpacked models and downloads."""
        return {
            path
            for root in (self.store, self.workdir)
            for path in root.rglob("*")
            if path not in (self.workdir / "models", self.workdir / "downloads")
        }


@pytest.fixture
def opener(tmp_path, monkeypatch):
    opener = Opener(tmp_path / "store", tmp_path / "work")
    opener.store.mkdir()
    opener.workdir.mkdir()
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    return opener


# In the store ---------------------------------------------------------------------------------


def test_a_file_in_the_store_is_unpacked_into_a_directory_of_its_own(opener):
    (opener.store / "m.mar").write_bytes(MAR)
    first, second = opener.open("m.mar"), opener.open("m.mar")
    assert (first.directory / "handler.py").read_bytes() == b"x = 1\n"
    assert first.directory.parent == opener.workdir / "models"
    assert re.fullmatch("[0-9a-f]{32}", first.directory.name)
    assert first.directory != second.directory
    assert (first.url, first.source.name, first.is_downloaded) == ("m.mar", "m.mar", False)


def test_a_tar_in_the_store_loses_the_first_component_of_its_members(opener):
    (opener.store / "m.tar.gz").write_bytes(tgz_of({"m/handler.py": b"x"}))
    assert (opener.open("m.tar.gz").directory / "handler.py").read_bytes() == b"x"


def test_removing_an_archive_spares_the_file_in_the_store_and_can_be_repeated(opener):
    (opener.store / "m.mar").write_bytes(MAR)
    before = opener.everything()
    archive = opener.open("m.mar")
    archive.remove()
    archive.remove()
    assert opener.everything() == before


@pytest.mark.parametrize("form", ["sub/m.mar", "{store}/sub/m.mar"])
def test_a_path_into_the_store_is_as_good_as_a_name(opener, form):
    (opener.store / "sub").mkdir()
    (opener.store / "sub" / "m.mar").write_bytes(MAR)
    archive = opener.open(form.format(store=opener.store))
    assert (archive.directory / "handler.py").is_file()


def test_a_path_relative_to_the_current_directory_may_lead_into_the_store(opener):
    inside = replace(opener, store=Path("store").absolute())
    inside.store.mkdir()
    (inside.store / "m.mar").write_bytes(MAR)
    assert inside.open("store/m.mar").source.name == "m.mar"


def test_of_an_absolute_path_mlflow_wants_the_base_name_in_the_store(opener, tmp_path, caplog):
    (opener.store / "m.mar").write_bytes(MAR)
    (tmp_path / "m.mar").write_text("not read")
    caplog.set_level("INFO")
    for url in (f"{tmp_path}/m.mar", "/nowhere/at/all/m.mar", "some/where/m.mar"):
        archive = opener.open(url)
        assert (archive.directory / "handler.py").is_file()
        assert (archive.url, archive.source) == (url, opener.store / "m.mar")
        assert f"{url} is taken from the model store, as m.mar." in caplog.text


@pytest.mark.parametrize("name", ["secret.mar", "handler"])
def test_a_file_outside_the_store_is_not_found(opener, tmp_path, name):
    (tmp_path / name).write_bytes(MAR)
    url = str(tmp_path / name)
    assert opener.fails(url, ModelNotFound) == f"Model not found at: {url}"


def test_of_a_path_a_directory_in_the_store_has_the_base_name(opener):
    model_directory(opener.store / "m")
    archive = opener.open("/nowhere/m")
    assert archive.directory.resolve() == opener.store / "m"


def test_a_sibling_of_the_store_whose_name_begins_alike_is_outside(opener, tmp_path):
    (tmp_path / "store2").mkdir()
    (tmp_path / "store2" / "m.mar").write_bytes(MAR)
    opener.fails(str(tmp_path / "store2" / "m.mar"), ModelNotFound)


def test_links_in_the_store_are_the_owners_business(opener, tmp_path):
    (tmp_path / "real.mar").write_bytes(MAR)
    (opener.store / "m.mar").symlink_to(tmp_path / "real.mar")
    archive = opener.open("m.mar")
    assert archive.source.name == "m.mar"
    archive.remove()
    assert (tmp_path / "real.mar").is_file()
    assert (opener.store / "m.mar").is_symlink()


def test_a_bad_archive_in_the_store_is_refused(opener):
    (opener.store / "m.mar").write_bytes(zip_of({"../x": b""}))
    assert opener.fails("m.mar", ArchiveRefused) == "Detected Zip Slip vulnerability: ../x"


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("", "empty url"),
        ("../m.mar", "Relative path is not allowed in url: ../m.mar"),
        ("a..b.mar", "Relative path is not allowed in url: a..b.mar"),
        ("nowhere.mar", "Model not found at: nowhere.mar"),
        ("/nowhere/m.mar", "Model not found at: /nowhere/m.mar"),
        (
            "s3://bucket/m.mar",
            "Model not found at: s3://bucket/m.mar: allowed_urls has no pattern for it.",
        ),
        ("ftp://host/m.mar", "Model not found at: ftp://host/m.mar"),
        ("nul\0.mar", "Model not found at: nul\0.mar"),
        ("n" * 300, f"Model not found at: {'n' * 300}"),
        ("\ud800", "Model not found at: \ud800"),
        ("http:/one/slash.mar", "Model not found at: http:/one/slash.mar"),
    ],
)
def test_a_url_that_leads_nowhere(opener, url, sentence):
    assert opener.fails(url, ModelNotFound) == sentence


@pytest.mark.parametrize(
    ("file_name", "name"),
    [
        ("squeezenet1_1.mar", "squeezenet1_1"),
        ("res net-18.v2.mar", "res_net_18_v2"),
        ("m.tar.gz", "m_tar"),
        ("directory", "directory"),
        ("modèle.mar", "mod_le"),
    ],
)
def test_the_name_of_a_model_whose_manifest_has_none(file_name, name):
    assert implied_model_name(file_name) == name


# Directories ----------------------------------------------------------------------------------


def model_directory(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "handler.py").write_bytes(b"x = 1\n")
    (path / "weights.pt").touch()
    return path


@pytest.mark.parametrize("where", ["store/my.model", "cwd/my.model", "other/my.model"])
def test_a_directory_is_linked_and_survives_its_removal(opener, tmp_path, where):
    directory = model_directory(tmp_path / where)
    url = str(directory) if where.startswith("other") else "my.model"
    before = opener.everything()
    archive = opener.open(url)
    assert archive.directory.name == archive.source.name == "my.model"
    assert archive.directory.parent.parent == opener.workdir / "models"
    assert archive.directory.resolve() == directory
    archive.remove()
    assert opener.everything() == before
    assert (directory / "handler.py").is_file()


def test_a_change_in_a_linked_directory_is_seen(opener):
    directory = model_directory(opener.store / "m")
    archive = opener.open("m")
    (directory / "handler.py").write_bytes(b"x = 2\n")
    assert (archive.directory / "handler.py").read_bytes() == b"x = 2\n"


def test_a_file_in_the_store_comes_before_a_directory_of_that_name(opener):
    model_directory(Path("m").absolute())
    (opener.store / "m").write_bytes(tgz_of({"m/only_in_the_file.py": b""}))
    assert (opener.open("m").directory / "only_in_the_file.py").is_file()


def test_a_directory_at_the_path_comes_before_one_in_the_store(opener):
    here = model_directory(Path("m").absolute())
    model_directory(opener.store / "m")
    assert opener.open("m").directory.resolve() == here


def test_a_directory_that_is_all_another_holds_is_the_model(opener):
    inner = model_directory(opener.store / "outer" / "inner")
    archive = opener.open("outer")
    assert archive.directory.resolve() == inner
    assert (archive.directory.name, archive.source.name) == ("inner", "outer")


def test_a_manifest_alone_does_not_make_its_directory_the_model(opener):
    (opener.store / "m" / "MAR-INF").mkdir(parents=True)
    assert (opener.open("m").directory / "MAR-INF").is_dir()


# Downloads ------------------------------------------------------------------------------------


class Pages(BaseHTTPRequestHandler):
    """A site that serves archives well and badly; the path says how."""

    def do_GET(self) -> None:
        page = urlsplit(self.path)
        answer = getattr(self, f"_{Path(page.path).stem}", None)
        if answer is None:
            self.send_error(404)
        else:
            answer({key: values[0] for key, values in parse_qs(page.query).items()})

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the library's name
        pass

    def _start(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def _good(self, _: dict[str, str]) -> None:
        self._start(200, Content_Length=len(MAR))
        self.wfile.write(MAR)

    def _unannounced(self, _: dict[str, str]) -> None:
        self._start(200)
        self.wfile.write(MAR)

    def _anonymous(self, query: dict[str, str]) -> None:
        """Serves those only who do not say who they are."""
        if self.headers["authorization"] is None:
            self._good(query)
        else:
            self.send_error(400)

    def _encoded(self, _: dict[str, str]) -> None:
        self._start(200, Content_Encoding="gzip")
        self.wfile.write(tgz_of({"m/handler.py": b"x"}))

    def _unsafe(self, _: dict[str, str]) -> None:
        self._start(200)
        self.wfile.write(zip_of({"../x": b""}))

    def _rival(self, query: dict[str, str]) -> None:
        """Another writer creates the file during the download."""
        self._start(200, Content_Length=len(MAR))
        Path(query["file"]).write_bytes(b"mine")
        self.wfile.write(MAR)

    def _short(self, _: dict[str, str]) -> None:
        self._start(200, Content_Length=len(MAR) + 1)
        self.wfile.write(MAR)

    def _cut(self, _: dict[str, str]) -> None:
        self._start(200, Transfer_Encoding="chunked")
        self.wfile.write(b"%x\r\n" % len(MAR) + MAR[:-1])

    def _nothing(self, _: dict[str, str]) -> None:
        self._start(204)

    def _away(self, query: dict[str, str]) -> None:
        self._start(302, Location=query["to"])

    def _chatty(self, query: dict[str, str]) -> None:
        """A redirect with a body without end."""
        self._start(302, Location=query["to"])
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 20))

    def _endless(self, _: dict[str, str]) -> None:
        self._start(200)
        with contextlib.suppress(OSError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def _silent(self, _: dict[str, str]) -> None:
        """Headers and then no byte; ends when the client has left."""
        self._start(200, Content_Length=len(MAR))
        self.rfile.read(1)


@pytest.fixture(scope="module")
def site():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")


@pytest.mark.parametrize("page", ["good.mar", "unannounced.mar", "good.mar?token=abc#part"])
def test_a_download_is_kept_in_the_store_until_it_is_removed(opener, site, page):
    name = page.partition("?")[0]
    archive = opener.open(f"{site}/{page}")
    assert (archive.directory / "handler.py").read_bytes() == b"x = 1\n"
    assert (archive.source, archive.is_downloaded) == (opener.store / name, True)
    assert [path.name for path in opener.store.iterdir()] == [name]
    assert (opener.store / name).read_bytes() == MAR
    archive.remove()
    assert opener.everything() == set()


def test_a_private_download_meets_no_other_and_is_gone_when_it_is_unpacked(opener, site):
    (opener.store / "good.mar").write_bytes(b"another server's")
    archives = [opener.open(f"{site}/good.mar", is_private=True) for _ in range(2)]
    assert (opener.store / "good.mar").read_bytes() == b"another server's"
    assert list((opener.workdir / "downloads").iterdir()) == []
    for archive in archives:
        assert (archive.directory / "handler.py").read_bytes() == b"x = 1\n"
        archive.remove()
    opener.fails(f"{site}/missing.mar", DownloadFailed, is_private=True)
    opener.fails(f"{site}/unsafe.mar", ArchiveRefused, is_private=True)
    assert opener.everything() == {opener.store / "good.mar"}


ANOTHER_FILE = (
    "Model file already exists good.mar: the model store has another file of this name. Register "
    "that by its name, or delete it."
)


def test_a_download_never_replaces_what_the_store_has(opener, site):
    (opener.store / "good.mar").write_bytes(b"mine")
    assert opener.fails(f"{site}/good.mar", ServeError) == ANOTHER_FILE
    assert (opener.store / "good.mar").read_bytes() == b"mine"
    assert opener.everything() == {opener.store / "good.mar"}


def test_a_file_that_an_earlier_server_downloaded_is_used_and_stays(opener, site):
    (opener.store / "good.mar").write_bytes(MAR)
    archive = opener.open(f"{site}/good.mar")
    assert (archive.directory / "handler.py").read_bytes() == b"x = 1\n"
    assert (archive.source, archive.is_downloaded) == (opener.store / "good.mar", False)
    archive.remove()
    assert opener.everything() == {opener.store / "good.mar"}


def test_a_download_whose_place_an_open_archive_has_is_refused(opener, site):
    async def open_twice():
        archives = opener.archives()
        used = "Model file already exists good.mar: another model uses it."
        opening = asyncio.create_task(archives.open(f"{site}/good.mar"))
        await asyncio.sleep(0)
        with pytest.raises(ServeError, match=f"^{used}$"):
            await archives.open(f"{site}/good.mar")
        opened = await opening
        with pytest.raises(ServeError, match=f"^{used}$"):
            await archives.open(f"{site}/good.mar")
        await archives.remove(opened)
        await archives.remove(await archives.open(f"{site}/good.mar"))

    asyncio.run(open_twice())
    assert opener.everything() == set()


def test_a_name_taken_during_the_download_is_not_replaced(opener, site):
    taken = opener.store / "rival.mar"
    with pytest.raises(ServeError, match="Model file already exists"):
        opener.open(f"{site}/rival.mar?file={taken}")
    assert [path.read_bytes() for path in opener.store.iterdir()] == [b"mine"]


def test_a_name_taken_by_a_dangling_link_is_taken(opener, site):
    (opener.store / "good.mar").symlink_to("/nowhere/at/all")
    sentence = opener.fails(f"{site}/good.mar", ServeError)
    assert sentence == "Model file already exists good.mar: it is no file."


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("missing.mar", "HTTP Error 404: Not Found."),
        ("nothing.mar", "HTTP Error 204: No Content."),
        ("short.mar", "Response payload is not completed"),
        ("cut.mar", "Response payload is not completed"),
    ],
)
def test_a_download_that_does_not_come_through_leaves_nothing_and_says_why(
    opener, site, page, reason, caplog
):
    url = f"{site}/{page}"
    sentence = opener.fails(url, DownloadFailed)
    assert sentence.startswith(f"Failed to download archive from: {url}: {reason}")
    assert f"Download of {url} failed: " in caplog.text


def test_the_reason_of_a_failed_download_names_no_secrets(opener, site):
    host = site.removeprefix("http://")
    url = f"http://me:secret@{host}/missing.mar?signature=secret#secret"
    assert opener.fails(url, DownloadFailed) == (
        f"Failed to download archive from: {site}/missing.mar: HTTP Error 404: Not Found."
    )
    to = f"ftp://me:secret%40{host}/x.mar%3Fsignature=secret"
    sentence = opener.fails(f"{site}/away.mar?to={to}", DownloadFailed)
    assert sentence.startswith(f"Failed to download archive from: {site}/away.mar: a redirect to ")
    strict = replace(opener, allowed_urls=(f"{site}/away.mar.*",))
    refusals = [
        strict.fails(f"{site}/away.mar?to=/x.mar%3Fsignature=secret", ModelNotFound),
        strict.fails(f"{site}/good.mar?signature=secret", ModelNotFound),
        opener.fails(f"{site}/?signature=secret", ModelNotFound),
        opener.fails("s3://bucket?signature=secret", ServeError),
        opener.fails("ssh://me:secret@host/m.mar", ModelNotFound),
        opener.fails(f"{site}/../m.mar?signature=secret", ModelNotFound),
    ]
    assert "secret" not in "".join([sentence, *refusals])


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:1/m.mar", "Cannot connect to host 127.0.0.1:1"),
        ("http://[::1/m.mar", "the URL is malformed."),
        ("http:///m.mar", "the URL is malformed."),
        ("http://127.0.0.1:port/m.mar", "the URL is malformed."),
        ("http://127.0.0.1:port", "the URL is malformed."),
        ("http://[zz]/m.mar", "the URL is malformed."),
        ("https://:1/m.mar", "the URL is malformed."),
        ("http://127.0.0.1/spa ce.mar", "Cannot connect to host 127.0.0.1:80"),
        ("http://127.0.0.1/é.mar", "Cannot connect to host 127.0.0.1:80"),
        (f"http://127.0.0.1/{'n' * 300}.mar", "File name too long."),
    ],
)
def test_a_host_or_a_name_that_cannot_be_fails_the_download(opener, url, reason):
    sentence = opener.fails(url, DownloadFailed)
    assert sentence.startswith(f"Failed to download archive from: {url}: {reason}")


def test_a_url_without_a_file_name_is_not_found(opener, site):
    assert opener.fails(f"{site}/", ModelNotFound) == f"Model not found at: {site}/"


def test_an_unsafe_download_is_refused_and_not_kept(opener, site):
    sentence = opener.fails(f"{site}/unsafe.mar", ArchiveRefused)
    assert sentence == "Detected Zip Slip vulnerability: ../x"


def test_a_download_larger_than_its_room_is_given_up(opener, site, caplog):
    small = replace(opener, limits=ArchiveLimits(max_bytes=1 << 18))
    small.fails(f"{site}/endless.mar", DownloadFailed)
    assert "larger than the 262144 bytes" in caplog.text


def test_a_download_that_takes_too_long_is_given_up(opener, site, caplog):
    hurried = replace(opener, limits=ArchiveLimits(download_seconds=0.0))
    hurried.fails(f"{site}/endless.mar", DownloadFailed)
    assert "it takes too long" in caplog.text


def test_a_download_that_stalls_is_given_up(opener, site):
    impatient = replace(opener, limits=ArchiveLimits(stall_seconds=0.05))
    impatient.fails(f"{site}/silent.mar", DownloadFailed)


@pytest.mark.parametrize("page", ["silent.mar", "endless.mar", "chatty.mar?to=/silent.mar"])
def test_a_cancelled_download_leaves_nothing(opener, site, page):
    async def cancel():
        opening = asyncio.ensure_future(opener.opening(f"{site}/{page}"))
        while not list(opener.store.iterdir()):  # noqa: ASYNC110 - no event for a new file
            await asyncio.sleep(0)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    asyncio.run(cancel())
    assert opener.everything() == set()


class InterruptedLimits(ArchiveLimits):
    """Limits whose question for free disk space is interrupted."""

    def room_in(self, directory: Path) -> int:
        raise KeyboardInterrupt


def test_an_interrupted_download_leaves_nothing(opener, site):
    interrupted = replace(opener, limits=InterruptedLimits())
    with pytest.raises(KeyboardInterrupt):
        interrupted.open(f"{site}/good.mar")
    assert opener.everything() == set()


@pytest.mark.parametrize("prefix", ["http://", ""])
def test_a_proxy_of_the_environment_is_asked(opener, site, prefix, monkeypatch):
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("http_proxy", prefix + site.removeprefix("http://"))
    assert opener.open("http://nowhere.invalid/good.mar").source.name == "good.mar"


def test_passwords_of_netrc_stay_at_home(opener, site, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert opener.open(f"{site}/anonymous.mar").source.name == "anonymous.mar"


def test_a_compressed_answer_is_kept_as_it_came(opener, site):
    archive = opener.open(f"{site}/encoded.tgz")
    assert (archive.directory / "handler.py").read_bytes() == b"x"


# allowed_urls ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "passes"),
    [
        (".*", True),
        ("HTTP://127.0.0.1:[0-9]+/.*", True),
        ("https://.*", False),
        ("http://127", False),
        (".*mar.", False),
    ],
)
def test_a_pattern_must_match_the_whole_url_in_any_case(opener, site, pattern, passes):
    strict = replace(opener, allowed_urls=("nothing", pattern))
    url = f"{site}/good.mar"
    if passes:
        assert strict.open(url).source.name == "good.mar"
    else:
        sentence = strict.fails(url, ModelNotFound)
        assert sentence == f"Given URL {url} does not match any allowed URL(s)"


@pytest.mark.parametrize("page", ["away.mar", "chatty.mar"])
def test_a_redirect_to_an_allowed_url_is_followed(opener, site, page):
    archive = opener.open(f"{site}/{page}?to=/good.mar")
    assert archive.source.name == page
    assert (archive.directory / "handler.py").is_file()


@pytest.mark.parametrize("page", ["away.mar", "chatty.mar"])
def test_a_redirect_to_a_forbidden_url_is_refused(opener, site, page):
    strict = replace(opener, allowed_urls=(rf"{site}/{page}\?.*",))
    sentence = strict.fails(f"{site}/{page}?to=/good.mar", ModelNotFound)
    assert sentence == f"Given URL {site}/good.mar does not match any allowed URL(s)"


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1:1/x", "/away.mar"])
def test_a_redirect_to_another_scheme_or_in_a_circle_fails(opener, site, target):
    allowing_all = replace(opener, allowed_urls=(".*",))
    to = f"/away.mar?to={target}" if target.startswith("/") else target
    allowing_all.fails(f"{site}/away.mar?to={to}", DownloadFailed)


# file:// --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["file://{}", "file://localhost{}", "FILE://{}"])
def test_a_file_url_is_copied_into_the_store(opener, tmp_path, form):
    source = tmp_path / "my model.mar"
    source.write_bytes(MAR)
    archive = opener.open(form.format(str(source).replace(" ", "%20")))
    assert archive.source == opener.store / "my%20model.mar"
    archive.remove()
    assert source.read_bytes() == MAR
    assert opener.everything() == set()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("file:///nowhere.mar", "No such file or directory."),
        ("file:///dev/zero", "it is no file."),
        ("file:///etc", "it is no file."),
        ("file://host/x.mar", "a file URL with a host."),
    ],
)
def test_a_file_url_that_names_no_file_fails_the_download(opener, url, reason):
    sentence = opener.fails(url, DownloadFailed)
    assert sentence == f"Failed to download archive from: {url}: {reason}"


@pytest.mark.parametrize("dots", ["..", "%2e%2e", "%2E.", ".%2e"])
def test_dots_cannot_lead_a_file_url_out_of_what_is_allowed(opener, dots):
    (opener.workdir / "m.mar").write_bytes(MAR)
    strict = replace(opener, allowed_urls=(f"file://{opener.store}/.*",))
    url = f"file://{opener.store}/{dots}/work/m.mar"
    assert strict.fails(url, ModelNotFound) == f"Relative path is not allowed in url: {url}"


def test_dots_cannot_hide_behind_characters_that_url_parsers_drop(opener):
    (opener.workdir / "m.mar").write_bytes(MAR)
    careless = replace(opener, allowed_urls=(f"file://{opener.store}/[^?]*",))
    careless.fails(f"file://{opener.store}/.\t./work/m.mar", DownloadFailed)


def test_a_forbidden_file_url_is_refused(opener):
    strict = replace(opener, allowed_urls=("https://.*",))
    sentence = strict.fails("file:///etc/passwd", ModelNotFound)
    assert sentence == "Given URL file:///etc/passwd does not match any allowed URL(s)"
