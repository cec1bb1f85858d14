"""A catalog behind a URL: of a web server, and of what speaks the protocol of S3."""

import asyncio
import contextlib
import gzip
import socket
import threading
import tracemalloc

import pytest
from object_store import ObjectStore

from marserve.frontend.catalog.document import MAX_BYTES, WrongCatalog, read_catalog
from marserve.frontend.catalog.http_store import HttpStore
from marserve.frontend.catalog.store import StoreFailed


@pytest.fixture(params=["http", "s3"])
def objects(request, monkeypatch):
    """Objects, one of them a catalog; and the store that reads it."""
    is_s3 = request.param == "s3"
    with ObjectStore(is_signed=is_s3).served() as objects:
        for name, value in objects.environment().items():
            monkeypatch.setenv(name, value)
        objects.objects["/bucket/a%20b.json"] = b"first"
        url = "s3://bucket/a b.json" if is_s3 else f"{objects.url}/bucket/a%20b.json"
        yield objects, HttpStore(url, 2.0)


@pytest.mark.parametrize("is_weak", [False, True])
def test_an_object_is_read_again_when_its_etag_differs(objects, is_weak):
    objects, store = objects
    objects.is_weak = is_weak
    document = asyncio.run(store.read())
    assert document.text == b"first"
    assert asyncio.run(store.read(document.revision)) is None
    objects.objects["/bucket/a%20b.json"] = b"second"
    assert asyncio.run(store.read(document.revision)).text == b"second"
    assert [status for _, status in objects.requests] == [200, 304, 200]


def test_what_is_not_there_is_told(objects):
    objects, store = objects
    revision = asyncio.run(store.read()).revision
    objects.objects.clear()
    with pytest.raises(StoreFailed, match="404: Not Found, NoSuchKey"):
        asyncio.run(store.read(revision))


def test_no_more_is_read_than_a_catalog_may_have(objects):
    objects, store = objects
    objects.objects["/bucket/a%20b.json"] = bytes(MAX_BYTES + 1)
    with pytest.raises(StoreFailed, match="longer than"):
        asyncio.run(store.read())


def test_who_may_not_read_is_told_in_the_words_of_s3(objects, monkeypatch):
    objects, store = objects
    objects.is_signed = True
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(StoreFailed, match="403"):
        asyncio.run(store.read())


def test_nobody_there_is_told(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    store = HttpStore("http://127.0.0.1:1/catalog.json", 2.0)
    with pytest.raises(StoreFailed):
        asyncio.run(store.read())


@pytest.fixture
def raw():
    """A server whose answer is the bytes that are put into the list; its port comes first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answers = [listener.getsockname()[1]]

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    with client:
                        request = client.recv(65536)
                        client.sendall(answers[1].replace(b"REQUEST", request))

        thread = threading.Thread(target=serve)
        thread.start()
        yield answers
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"REQUEST",
        b"HTTP/1.1 200 OK\r\nREQUEST\r\n\r\n",
        b"HTTP/1.1 200 REQUEST" + b"x" * 7000 + b"\r\n\r\n",
        b"HTTP/1.1 404 " + b"secret" * 1000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 403 No\r\nx-amz-bucket-region: " + b"x" * 7000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: none\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
        b"",
    ],
)
def test_a_malformed_answer_is_neither_quoted_whole_nor_are_secrets(raw, answer, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    raw.append(answer)
    url = f"http://user:pass@127.0.0.1:{raw[0]}/c.json?X-Amz-Signature=topsecret&token=t0ken"
    store = HttpStore(url, 2.0)
    with pytest.raises(StoreFailed) as caught:
        asyncio.run(store.read())
    text = str(caught.value)
    assert len(text) < 700
    assert not any(word in text for word in ("pass", "topsecret", "t0ken", "dXNlcjpwYXNz"))


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pass@h:port/c",
        "http://user:pass@[zz]/c",
        "http://user:pass@\u2100/c",
        "http://user:pass@?topsecret",
        "http://user:pass@127.0.0.1:1/c?topsecret",
        "s3://user:pass@bucket/c?topsecret",
        "s3://user:pass@/c",
    ],
)
def test_no_failure_names_secrets_of_the_url(url, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "key")
    store = HttpStore(url, 2.0)
    with pytest.raises(StoreFailed) as caught:
        asyncio.run(store.read())
    for text in (str(caught.value), store.place):
        assert "pass" not in text
        assert "topsecret" not in text


def test_a_gzip_bomb_is_not_decoded(raw, monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    bomb = gzip.compress(bytes(256 << 20), 9)
    assert len(bomb) < MAX_BYTES
    headers = b"ETag: x\r\nContent-Encoding: gzip\r\nContent-Length: %d" % len(bomb)
    raw.append(b"HTTP/1.1 200 OK\r\n" + headers + b"\r\n\r\n" + bomb)
    store = HttpStore(f"http://127.0.0.1:{raw[0]}/c.json", 10.0)
    tracemalloc.start()
    try:
        document = asyncio.run(store.read())
        assert document is not None
        assert document.text == bomb
        with pytest.raises(WrongCatalog, match="not valid JSON"):
            read_catalog(document.text)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_no_secret_of_a_url_is_told():
    store = HttpStore("https://user:secret@host:1/c.json?signature=x", 1.0)
    assert store.place == "https://host:1/c.json"
