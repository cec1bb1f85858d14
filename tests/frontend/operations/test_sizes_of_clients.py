"""Work whose size a client decides: each step is short, and what it adds to memory is counted."""

import base64
import contextlib
import gc
import gzip
import json
import os
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from steps import result_of

from marserve.backend.protocol import Input, Part, Prediction
from marserve.backend.tensors.datatypes import BYTES, write_elements
from marserve.backend.tensors.rows import Output
from marserve.frontend.aio.long_work import Steps
from marserve.frontend.errors import ServeError
from marserve.frontend.http.content_encoding import decoded
from marserve.frontend.http.forms import FormLimits, multipart_parts, urlencoded_parts
from marserve.frontend.operations.client_lists import ClientList, read_list
from marserve.frontend.operations.json_tensors import AnswerBody
from marserve.frontend.operations.open_inference import AskedModel, input_of_body
from marserve.frontend.operations.open_inference_answers import InferAnswer
from marserve.frontend.operations.openai_rows import embedding_rows, read_members, reranking_rows
from marserve.frontend.workflows.workflow import answer_of

#: The default of max_request_size.
SIZE = 6_500_000
#: Rows for which a large queue has capacity.
ROWS = 20_000
#: Seconds of this thread that a step may take; most take less than 2 ms.
STEP_SECONDS = 0.05
#: Memory that is not counted: of up to 64 KiB of a request, and of the interpreter.
SPARE_BYTES = 1 << 20

BLANKS = b" " * SIZE
ESCAPES = b"\\n" * (SIZE // 2)
TENSORS = AskedModel("m", "1", takes_bytes=True, dims=(0, 0), max_rows=ROWS)
LIMITS = FormLimits(max_parts=ROWS)
JSON = "application/json"
TEXT = b'"%b"' % (b"x" * 97)


def items(text: bytes, count: int) -> bytes:
    return b",".join([text] * count)


def openai(split: Any, members: bytes) -> Steps[Any]:
    body = b'{"model":"m",%b}' % members
    input_ = Input("id", {"content-type": JSON}, [Part("body", JSON, body)])

    def steps() -> Steps[Any]:
        return (yield from split(input_, (yield from read_members(body)), ROWS, 2))

    return steps()


def client_list(body: bytes) -> Steps[Any]:
    return read_list(Input("id", {}, [Part("body", JSON, body)]), "", ROWS)


def tensors(data: bytes, shape: list[int], datatype: str = "FP32", more: bytes = b"") -> Steps[Any]:
    head = json.dumps({"name": "x", "shape": shape, "datatype": datatype})[:-1].encode()
    body = b'{"inputs":[%b,"data":[%b]}]%b}' % (head, data, more)
    return input_of_body(Input("id", {}, [Part("body", JSON, body)]), TENSORS)


def embedding(answer: bytes) -> Steps[Any]:
    _, join = result_of(openai(embedding_rows, b'"input":"x"'))
    joining: Steps[Any] = join([Prediction(answer)])
    return joining


def multipart(value: bytes, encoding: bytes = b"binary", count: int = 1) -> Steps[Any]:
    head = b'\r\nContent-Disposition: form-data; name="n"; filename="f"\r\n'
    part = b"--b%bContent-Transfer-Encoding: %b\r\n\r\n%b\r\n" % (head, encoding, value)
    return multipart_parts(part * count + b"--b--", "b", LIMITS)


def answer(datatype: str, buffer: bytes, count: int) -> Steps[Any]:
    output = Output("y", datatype, [count], buffer)
    return AnswerBody({}, {"id": "7"}).write(InferAnswer(outputs=[output]))


CASES: dict[str, Callable[[], Steps[Any]]] = {
    "an embedding of escapes": lambda: openai(embedding_rows, b'"input":"%b"' % ESCAPES),
    "many embeddings": lambda: openai(embedding_rows, b'"input":[%b]' % items(b'"x"', ROWS)),
    "large embeddings": lambda: openai(
        embedding_rows, b'"input":[%b]' % items(b'"%b"' % (b"x" * (SIZE // 10)), 10)
    ),
    "token ids": lambda: openai(embedding_rows, b'"input":[[%b]]' % items(b"17", SIZE // 3)),
    "a name of escapes": lambda: openai(embedding_rows, b'"%b":1,"input":"x"' % ESCAPES),
    "blanks behind a name": lambda: openai(embedding_rows, b'"input"%b:"x"' % BLANKS),
    "blanks before a value": lambda: openai(embedding_rows, b'"input":%b"x"' % BLANKS),
    "blanks behind a value": lambda: openai(embedding_rows, b'"input":"x"%b' % BLANKS),
    "a query for many documents": lambda: openai(
        reranking_rows, b'"query":"%b","documents":[%b]' % (b"q" * SIZE, items(b'"d"', 100))
    ),
    "documents that are objects": lambda: openai(
        reranking_rows, b'"query":"q","documents":[%b]' % items(b'{"text":"d"}', ROWS)
    ),
    "a document that is a large object": lambda: openai(
        reranking_rows, b'"query":"q","documents":[{"%b":1,"text":"d"}]' % ESCAPES
    ),
    "a list": lambda: client_list(b"[%b]" % items(b"1", ROWS)),
    "a list of a large item": lambda: client_list(b'["%b"]' % ESCAPES),
    "a list behind blanks": lambda: client_list(BLANKS + b"[1]"),
    "a list before blanks": lambda: client_list(b"[1" + BLANKS + b"]"),
    "instances": lambda: client_list(b'{"instances":[%b]}' % items(b"[]", ROWS)),
    "instances behind a name of escapes": lambda: client_list(
        b'{"%b":1,"instances":[1]}' % ESCAPES
    ),
    "numbers": lambda: tensors(items(b"0." + b"5" * 15, SIZE // 18), [2, SIZE // 36]),
    "rows of numbers": lambda: tensors(items(b"0.5", ROWS), [ROWS, 1]),
    "numbers among blanks": lambda: tensors(b"1" + BLANKS + b",2", [2, 1]),
    "numbers among brackets": lambda: tensors(b"[" * 800 + b"1" + b"]" * 800 + BLANKS, [1]),
    "a number of many digits": lambda: tensors(b"0." + b"1" * SIZE, [1]),
    "empty elements": lambda: tensors(items(b'""', SIZE // 30), [2, SIZE // 60], BYTES),
    "rows of elements": lambda: tensors(items(b'""', ROWS), [ROWS, 1], BYTES),
    "one element": lambda: tensors(b'"%b"' % ESCAPES, [1], BYTES),
    "a parameter beside tensors": lambda: tensors(b"1", [1], more=b',"id":"%b"' % ESCAPES),
    "fields": lambda: urlencoded_parts(items(b"a=%41", ROWS).replace(b",", b"&"), LIMITS),
    "a field of escapes": lambda: urlencoded_parts(b"a=" + b"%41" * (SIZE // 3), LIMITS),
    "a file": lambda: multipart(b"x" * SIZE),
    "many files": lambda: multipart(b"x", count=SIZE // 120),
    "a file in base64": lambda: multipart(base64.b64encode(b"x" * (SIZE // 4 * 3)), b"base64"),
    "a file in a part of files": lambda: multipart_parts(
        b"--b\r\nContent-Disposition: form-data; name=n\r\nContent-Type: multipart/mixed; "
        b"boundary=c\r\n\r\n--c\r\n\r\n%b\r\n--c--\r\n--b--" % (b"x" * SIZE),
        "b",
        LIMITS,
    ),
    "zeros in gzip": lambda: decoded(gzip.compress(bytes(SIZE)), "gzip", SIZE),
    "zeros in deflate": lambda: decoded(zlib.compress(bytes(SIZE)), "deflate", SIZE),
    "noise in gzip": lambda: decoded(gzip.compress(os.urandom(SIZE)), "gzip", SIZE),
    "many members of gzip": lambda: decoded(gzip.compress(b"") * (SIZE // 20), "gzip", SIZE),
    "a bomb": lambda: decoded(gzip.compress(bytes(10 * SIZE)), "gzip", SIZE),
    "a quoted file": lambda: multipart(b"=41" * (SIZE // 3), b"quoted-printable"),
    "answered numbers": lambda: answer("FP32", b"abcd" * (SIZE // 4), SIZE // 4),
    "answered elements": lambda: answer(BYTES, write_elements([b"x"] * ROWS), ROWS),
    "answers to a list": lambda: ClientList([]).join(
        [Prediction(b"[%b]" % items(TEXT, SIZE // 1000))] * 10
    ),
    "a large text among answers": lambda: ClientList([]).join([Prediction(b"x\n" * (SIZE // 2))]),
    "an answered embedding": lambda: embedding(b"[%b]" % items(b"0.12345", SIZE // 8)),
    "outputs of leaves": lambda: answer_of(
        {name: Prediction(b"[%b]" % items(TEXT, SIZE // 100)) for name in "ab"}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_step_is_short(case):
    steps = CASES[case]()
    longest = 0.0
    gc.disable()  # the server has few objects that it collects
    try:
        while True:
            began = time.thread_time()
            try:
                next(steps)
            finally:
                longest = max(longest, time.thread_time() - began)
    except (StopIteration, ServeError):  # some are refused
        pass
    finally:
        gc.enable()
    assert longest < STEP_SECONDS


@pytest.mark.parametrize("case", CASES)
def test_what_stays_in_memory_is_counted(case, monkeypatch):
    monkeypatch.setitem(globals(), "ROWS", 2000)  # tracemalloc takes a long time for each object
    monkeypatch.setitem(globals(), "SIZE", 2_000_000)
    counted = 0

    def hold(count):
        nonlocal counted
        counted += count

    steps = CASES[case]()
    tracemalloc.start()
    try:
        result = None
        with contextlib.suppress(ServeError):  # some are refused
            result = result_of(steps, hold)
        gc.collect()
        stays, _ = tracemalloc.get_traced_memory()
        del result
    finally:
        tracemalloc.stop()
    assert stays < counted * 9 / 8 + SPARE_BYTES  # a bytearray grows by an eighth at a time
