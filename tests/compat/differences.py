"""Why an answer of ours is meant to differ from TorchServe's. The first line that fits is taken.

Each line: setting, request, aspect (patterns in which * and ? stand for anything), reason.
"""

import re
from collections.abc import Iterator
from functools import cache

_API = "our API description says more: every path, every answer, unique operation ids"
_CLOSE = "the client's wish to close the connection is honoured"
_KEPT = "an error to a request that was read whole leaves the connection open"
_REASON_OF_FAILURE = "the same message, followed by the reason"
_ROLLED_BACK = "a failed registration leaves nothing behind"
_BAD_JSON = "a bad request is 400, not 500"
_BAD_FORM = "a malformed form is 400, not 500"
_LENIENT_FORM = "a field without a name is passed over, as one without a value is"
_BROKEN_PARTS = "a multipart body that is cut short or has another boundary is refused, not emptied"
_STRICT_HTTP = "aiohttp's parser asks for valid HTTP"
_LONGER_LINES = "the limits of line and headers are aiohttp's 8190 bytes each"
_OTHER_BATCH_MATES = "only the request whose answer cannot be sent fails"
_INNOCENT_BATCH_MATES = "who shares a batch with a failure is run again without it"
_OUR_NAME = "without a manifest the name comes from the file or directory"
_SHARED = "version-specific management is reachable on a shared port"
_ALWAYS_METRICS = "metrics are served in log mode too"
_UNKNOWN_ROUTE = "an unknown path is not found, with or without a token"
_NO_NUMBER = "numbers that make no sense are refused, and so the model is not there"
_EMPTY_BATCH = "a batch size of 0 is refused, and so the model is not there"
_EMPTY_NAME = "an empty name is no model"
_SAYS_MORE = "says what is wrong"
_NAMES_THE_LIMIT = "413 has the headers of every answer, and a body that names the limit"
_SAYS_WHY_IT_DIED = "behind TorchServe's words stands how the process ended"
_VERSIONS = "versions are served"
_METADATA = "metadata and readiness of a model are answered"
_YAML_TIMEOUT = "a yaml that names no timeout leaves the server's default in force"

EXPECTED: tuple[tuple[str, str, str, str], ...] = (
    # Everywhere
    ("*", "*: OPTIONS /", "body", _API),
    ("*", "*: * /api-description", "body", _API),
    ("*", "inference: OPTIONS *", "body", _API),
    ("*", "*: OPTIONS /models/probe*", "body", _API),
    ("*", "management: OPTIONS /models (*", "*", "OPTIONS is answered on every path, for CORS"),
    ("*", "* (path is a star)", "*", "OPTIONS * asks for the server; TorchServe fails"),
    # HTTP
    ("*", "* (Connection: close)", "header connection", _CLOSE),
    ("*", "* (asks for a close)", "header connection", _CLOSE),
    ("*", "* (HTTP/1.0)", "header connection", _CLOSE),
    ("*", "*", "header connection", _KEPT),
    ("*", "* (absolute form)", "*", "the absolute form, which proxies use, is understood"),
    ("*", "* (no host)", "*", _STRICT_HTTP),
    ("*", "* (HTTP/9.9)", "*", _STRICT_HTTP),
    ("*", "* (unknown method)", "*", _STRICT_HTTP),
    ("*", "* (lower-case method)", "*", _STRICT_HTTP),
    ("*", "* (path without a slash)", "*", _STRICT_HTTP),
    ("*", "* (unknown expectation)", "*", "an expectation that is not known is passed over"),
    ("*", "* (broken escape)", "*", "a broken escape stands for itself"),
    ("*", "* (incomplete escape)", "*", "a broken escape stands for itself"),
    ("*", "*/%zz (*", "*", "a broken escape stands for itself"),
    ("*", "* (query of 4*)", "*", _LONGER_LINES),
    ("*", "* (result: too large)", "*", "says what is wrong, and the worker lives"),
    ("*", "* too large)", "header *", _NAMES_THE_LIMIT),
    ("*", "* too large)", "body", _NAMES_THE_LIMIT),
    ("*", "* (body beyond the limit)", "header *", _NAMES_THE_LIMIT),
    ("*", "* (body beyond the limit)", "body", _NAMES_THE_LIMIT),
    ("*", "*/nobody (expects 100, too large)", "*", "no body is asked for without a model"),
    # Registration
    ("*", "*runtime=", "*", "an empty runtime counts as not given"),
    ("*", "* (whatever is left of the refused)", "*", "an empty runtime counts as not given"),
    ("*", "*url=s3:*", "body", _SAYS_MORE),
    ("*", "*url=no-zip.mar", "body", _SAYS_MORE),
    ("*", "*url=no-tar.tar.gz", "*", "an archive that is none is 400, and says what is wrong"),
    ("*", "*url=slip.mar", "*", "an unsafe archive is 400, and says what is wrong"),
    ("*", "*url=manifest-none.mar&initial_workers=1", "*", _OUR_NAME),
    ("*", "*url=sagemaker&*", "*", _OUR_NAME),
    ("*", "*url=nested&*", "*", _OUR_NAME),
    ("main", "*/sagemaker*", "*", _OUR_NAME),
    ("main", "*/nested*", "*", _OUR_NAME),
    ("*", "*url=manifest-no-model.mar", "body", _SAYS_MORE),
    ("*", "*url=manifest-empty.mar", "body", _SAYS_MORE),
    ("*", "* (JSON {broken)", "*", _BAD_JSON),
    ("*", "* (JSON [])", "*", _BAD_JSON),
    ("*", "* (JSON null)", "*", _BAD_JSON),
    ("*", "* (JSON )", "*", _BAD_JSON),
    ("*", '* (JSON {"url": 7})', "body", "a url that is no text counts as empty"),
    ("*", "*odd-numbers*", "*", _NO_NUMBER),
    ("*", "*zeroes*", "*", _NO_NUMBER),
    ("*", "*no-batch*", "*", _EMPTY_BATCH),
    ("*", "*/by-json", "body", "JSON registration has the default delay of the query's"),
    ("*", "*url=fails-*", "body", _REASON_OF_FAILURE),
    ("*", "*POST /models?url=*://*/no*.mar*", "body", _REASON_OF_FAILURE),
    ("*", "*POST /models?url=*://*/absent.mar*", "body", _REASON_OF_FAILURE),
    ("*", "*PUT /models/fails-*", "body", _REASON_OF_FAILURE),
    ("*", "*/models/fails-* (after a failed load)", "*", _ROLLED_BACK),
    ("*", "*/m1?min_worker=-1", "*", "400, not 500"),
    ("*", "*GET /models/probe/1.0/set-default", "*", "405 rather than a description"),
    # Inputs
    ("*", "*urlencoded: =1)", "*", _LENIENT_FORM),
    ("*", "*urlencoded: &&a=1&&)", "*", _LENIENT_FORM),
    ("*", "*urlencoded: a=%)", "*", _BAD_FORM),
    ("*", "*urlencoded: a=%zz)", "*", _BAD_FORM),
    ("*", "* (multipart: no name)", "*", _BAD_FORM),
    ("*", "* (multipart: no end)", "*", _BROKEN_PARTS),
    ("*", "* (multipart: another boundary)", "*", _BROKEN_PARTS),
    ("*", "* (describe: True)", "body", "a client cannot order a description for its batch"),
    # Routes
    ("*", "*/predictions//1.0", "body", _EMPTY_NAME),
    ("*", "*/v1/models/:predict", "body", _EMPTY_NAME),
    ("*", "*/invocations?model_name=", "*", "an empty name counts as not given"),
    # Open Inference Protocol, envelopes, descriptions
    ("open inference", "* /v2/models/*/versions/*", "*", _VERSIONS),
    ("open inference", "* /v2/models/probe*", "*", _METADATA),
    ("open inference", "* /v2*", "body", "the misspelt member, and the well-spelt one beside it"),
    ("envelope json", '*({"instances": []})', "body", "the message differs where nothing came in"),
    ("envelope json", '*({"instances": [1, 2]}) #2', "*", "bytes are parsed as JSON, as by kserve"),
    (
        "envelope kserve",
        '*({"other": 1})',
        "body",
        "what is missing is found before the handler runs",
    ),
    ("*", "*customized=*", "reason", "a description has the phrase of its status"),
    ("*", "*GET /models/narrow", "body", _YAML_TIMEOUT),
    ("*", "*GET /models/ticketed", "body", _YAML_TIMEOUT),
    # Answers
    ("*", "batch: one not serialisable*", "*", _OTHER_BATCH_MATES),
    ("*", '*{"do": "raise"}*', "body", _REASON_OF_FAILURE),
    ("*", "batch: one raises*", "body", _REASON_OF_FAILURE),
    ("*", "batch: one * [0]", "*", _INNOCENT_BATCH_MATES),
    ("*", "batch: one * [2]", "*", _INNOCENT_BATCH_MATES),
    ("*", "batch: too * [0]", "*", _INNOCENT_BATCH_MATES),
    ("*", "batch: too * [2]", "*", _INNOCENT_BATCH_MATES),
    ("*", "* (result: opaque)", "*", _SAYS_MORE),
    ("*", "* (result: set)", "*", _SAYS_MORE),
    ("*", '*"do": "unserialisable"*', "*", _SAYS_MORE),
    ("*", '* ({"do": "*exit"})', "*", _SAYS_WHY_IT_DIED),
    ("*", '* ({"do": "segfault"})', "*", _SAYS_WHY_IT_DIED),
    ("*", '* ({"do": "hang"})', "body", _SAYS_WHY_IT_DIED),
    ("*", "batch: one exits*", "*", _SAYS_WHY_IT_DIED),
    ("*", '*"code": 299})', "reason", "a phrase that is not registered stays empty"),
    # Tokens
    ("tokens", "* /nowhere (no key)", "*", _UNKNOWN_ROUTE),
    ("tokens", "*(the word token elsewhere)", "*", "/token is a path, not a word anywhere"),
    # Shared port
    ("shared port", "* /models/probe/1.0*", "*", _SHARED),
    ("shared port", "* /models/probe/all", "*", _SHARED),
    (
        "shared port",
        "inference: DELETE /models/probe",
        "*",
        "it was removed by version just before",
    ),
    # Metrics
    ("main", "metrics: * /metrics*", "body", _ALWAYS_METRICS),
    ("main", "metrics: * /metrics*", "header content-length", _ALWAYS_METRICS),
    ("tokens", "metrics: GET /metrics", "body", _ALWAYS_METRICS),
    ("tokens", "metrics: GET /metrics", "header content-length", _ALWAYS_METRICS),
    ("shared port", "metrics: GET /metrics", "body", _ALWAYS_METRICS),
    ("shared port", "metrics: GET /metrics", "header content-length", _ALWAYS_METRICS),
    ("shared port", "inference: GET /metrics", "body", _ALWAYS_METRICS),
    ("shared port", "inference: GET /metrics", "header content-length", _ALWAYS_METRICS),
    # Streams
    (
        "*",
        'inference: POST /predictions/continuous ({"until": 1})',
        "*",
        "TorchServe never answers",
    ),
)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], ...], ...]:
    return tuple(tuple(map(_pattern, line[:3])) for line in EXPECTED)


def _pattern(text: str) -> re.Pattern[str]:
    """As in `fnmatch`, but without sets of characters: requests are full of brackets."""
    return re.compile(re.escape(text).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)


def index_of(setting: str, request: str, aspect: str) -> int | None:
    """Which line of the table speaks of an aspect of an answer; None when none does."""
    return next(_lines((setting, request, aspect)), None)


def _lines(answer: tuple[str, str, str]) -> Iterator[int]:
    for number, patterns in enumerate(_patterns()):
        if all(map(re.Pattern.fullmatch, patterns, answer)):
            yield number
