"""The options of ``marserve bench``."""

import argparse
import difflib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from marserve.frontend.configuration.model_entry import TORCHSERVES
from marserve.frontend.configuration.setting_kinds import ABOVE_0, AUTOMATIC, Kind, whole
from marserve.tools.bench.errors import BenchError
from marserve.tools.bench.generator.destination import Destination
from marserve.tools.bench.generator.load import Arrivals
from marserve.tools.bench.payloads import KINDS
from marserve.tools.bench.points import SERVER_ROWS, Sweep
from marserve.tools.files import read_file

_CLIENTS = (8,)
_SECONDS = 10.0
_CORES_PER_PROCESS = 4  # three of four cores are left to the server
_LARGEST = 1_000_000_000  # the system takes no times of thousands of years
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):\s*(.*)", re.ASCII)
_CHOSEN_BY_TUNING = (
    "clients",
    "rate",
    "performance_hint",
    "max_batch_delay",
    "batch_policy",
    "max_latency_ms",
)
_OF_MEASURING = ("tune", "rate", "json", "csv", "html", "output_dir")
# Options of other servers and the corresponding ones here, as in docs/batching.md.
_OTHER_SERVERS = {
    "--batchable": "--batch-policy adaptive, or --batch-size 1",
    "--allow-auto-batching": "--batch-size",
    "--dynamic-batch-size": "dynamic_batch_size of POST and PUT /models",
    "--num-requests": "--clients",
    "--nireq": "--clients",
}
_SECRETS = ("--token", "--management-token", "--header")

T = TypeVar("T")


class Options(argparse.Namespace):
    """The parsed command line; each attribute is the option of that name."""

    model: str
    model_version: str
    url: str
    management_url: str
    metrics_url: str
    path: str
    header: list[tuple[str, str]]
    token: str
    management_token: str
    key_file: str
    timeout: float
    insecure: bool
    ca_certificate: str

    input: list[str]
    generate: str
    content_type: str

    clients: list[int]
    rate: list[float]
    arrivals: Arrivals
    seed: int
    max_connections: int
    seconds: float | None
    requests: int | None
    warm_up: float
    repeat: int
    processes: int
    max_error_percent: float

    performance_hint: list[str]
    batch_size: list[int | str]
    max_batch_delay: list[int]
    batch_policy: list[str]
    max_latency_ms: list[int]
    workers: list[int]
    precision: list[str]
    torch_threads: list[int | str]
    outstanding_batches: list[int]
    register: str

    validate: bool
    tolerance: float | None

    tune: float | None
    percentile: float | None

    json: Path | None
    csv: Path | None
    html: Path | None
    output_dir: Path | None
    no_progress: bool

    def destination(self, url: str) -> Destination:
        """Return the destination for the URL of a listener."""
        return Destination(url, verify=not self.insecure, ca_file=self.ca_certificate)

    @property
    def target(self) -> str:
        """Return the path that predictions are requested at."""
        if self.path:
            return self.path
        version = f"/{quote(self.model_version)}" if self.model_version else ""
        return f"/predictions/{quote(self.model)}{version}"

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the headers of a request for a prediction."""
        content_type = {"Content-Type": self.content_type} if self.content_type else {}
        return {**self._authorization("inference", self.token), **content_type, **dict(self.header)}

    @property
    def management_headers(self) -> Mapping[str, str]:
        """Return the headers of a request to the management listener."""
        return self._authorization("management", self.management_token)

    @property
    def sweep(self) -> Sweep:
        """Return the values to measure."""
        return Sweep(
            clients=self.clients or (() if self.rate else _CLIENTS),
            rates=self.rate,
            performance_hints=self.performance_hint,
            batch_sizes=self.batch_size,
            max_batch_delays_ms=self.max_batch_delay,
            batch_policies=self.batch_policy,
            max_latencies_ms=self.max_latency_ms,
            workers=self.workers,
            precisions=self.precision,
            torch_threads=self.torch_threads,
            outstanding_batches=self.outstanding_batches,
        )

    def _authorization(self, kind: str, key: str) -> dict[str, str]:
        key = key or (key_of(self.key_file, kind) if self.key_file else "")
        return {"Authorization": f"Bearer {key}"} if key else {}


def read_options(arguments: Sequence[str]) -> Options:
    """Parse the command line; an error in it ends the program with a message and status 2."""
    parser = build_parser()
    options, unknown = parser.parse_known_args(arguments, namespace=Options())
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_advice(parser, unknown)}")
    if options.input and options.generate:
        parser.error("--input and --generate exclude each other.")
    if options.seconds is not None and options.requests is not None:
        parser.error("--seconds and --requests exclude each other.")
    if options.seconds is None and options.requests is None:
        options.seconds = _SECONDS
    if wrong := _wrong_with_tuning(options) or _wrong_with_validating(options):
        parser.error(wrong)
    if options.path and not options.path.startswith("/"):
        parser.error("--path must begin with a slash.")
    return options


def _advice(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Return a suggestion for the first unknown option; empty if there is none."""
    name = unknown[0].partition("=")[0].lower().replace("_", "-")
    known = re.findall(r"--[a-z-]+", parser.format_help())
    if not name.startswith("--"):
        return ""
    if meant := _OTHER_SERVERS.get(name):
        return f" (here it is {meant})"
    alike = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {alike[0]}?)" if alike else ""


def _wrong_with_tuning(options: Options) -> str:
    """Return the conflict of an option with ``--tune``; empty if there is none."""
    if options.tune is None:
        return "--percentile is for --tune." if options.percentile is not None else ""
    chosen = [item for item in _CHOSEN_BY_TUNING if getattr(options, item)]
    if options.repeat > 1:
        chosen.append("repeat")
    if AUTOMATIC in options.batch_size:
        chosen.append("batch_size=auto")
    if chosen:
        return f"--{chosen[0].replace('_', '-')}: that is what --tune chooses."
    return "--tune is for one --precision." if len(options.precision) > 1 else ""


def _wrong_with_validating(options: Options) -> str:
    """Return the conflict of an option with ``--validate``; empty if there is none."""
    if not options.validate:
        return "--tolerance is for --validate." if options.tolerance is not None else ""
    chosen = [item for item in _OF_MEASURING if getattr(options, item)]
    return f"--{chosen[0].replace('_', '-')}: --validate measures nothing." if chosen else ""


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the command line for the reports, with the values of secret options replaced."""
    public: list[str] = []
    for index, argument in enumerate(arguments):
        name, has_value, _ = argument.partition("=")
        if name in _SECRETS and has_value:
            public.append(f"{name}=...")
        elif index and arguments[index - 1] in _SECRETS:
            public.append("...")
        else:
            public.append(argument)
    return public


class _Once(argparse.Action):
    """Stores a value; an option that is given again is an error instead of replacing it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        given = vars(namespace).setdefault("given", set())
        if self.dest in given:
            parser.error(f"{option_string} is given more than once; it takes one value.")
        given.add(self.dest)
        setattr(namespace, self.dest, values)


def build_parser() -> argparse.ArgumentParser:
    """Build the argument parser of ``marserve bench``."""
    parser = argparse.ArgumentParser(
        prog="marserve bench",
        description="Puts load on a served model, and measures throughput and latency. "
        "It uses TorchServe's HTTP interface, so it measures TorchServe as well. "
        "Options marked * take several values, separated by commas; every combination of values is "
        "measured.",
        epilog="marserve bench resnet-152 --input kitten.jpg --clients 1,8,64 --batch-size 1,8",
        allow_abbrev=False,  # a mistyped option must not become another one
    )
    parser.register("action", None, _Once)
    parser.add_argument("model", metavar="MODEL", help="name of the model")
    _add_server(parser.add_argument_group("server"))
    _add_input(parser.add_argument_group("input, sent in turn"))
    _add_load(parser.add_argument_group("load"))
    _add_settings(parser.add_argument_group("settings of the model, put back at the end"))
    _add_validation(parser.add_argument_group("validation"))
    _add_tuning(parser.add_argument_group("tuning"))
    _add_report(parser.add_argument_group("report"))
    return parser


def _add_server(group: Any) -> None:
    add = group.add_argument
    add("--url", default="http://127.0.0.1:8080", help="inference listener (%(default)s)")
    add("--management-url", default="http://127.0.0.1:8081", metavar="URL", help="(%(default)s)")
    add("--metrics-url", default="http://127.0.0.1:8082", metavar="URL", help="(%(default)s)")
    add("--model-version", default="", metavar="VERSION", help="instead of the default version")
    add("--path", default="", help="where to post, if not to /predictions/MODEL")
    add(
        "--header",
        action="append",
        default=[],
        type=_header,
        metavar="'NAME: VALUE'",
        help="sent with every request; may be repeated",
    )
    add("--token", default="", metavar="KEY", help="inference key, if the server requires one")
    add("--management-token", default="", metavar="KEY", help="management key")
    add("--key-file", default="", metavar="FILE", help="both keys: the server's key_file.json")
    add(
        "--timeout",
        type=_ABOVE_0,
        default=60.0,
        metavar="S",
        help="seconds to wait for an answer (%(default)g)",
    )
    add("--insecure", action="store_true", help="accept any certificate of an https server")
    add("--ca-certificate", default="", metavar="FILE", help="PEM file to check it with")


def _add_input(group: Any) -> None:
    add = group.add_argument
    add(
        "--input",
        action="append",
        default=[],
        metavar="FILE",
        help="a file, a directory or a pattern; may be repeated",
    )
    add(
        "--generate",
        default="",
        metavar="KIND",
        help=f"generate input: {KINDS}, shown with their default sizes (bytes without --input)",
    )
    add("--content-type", default="", metavar="TYPE", help="by default from the names of the files")


def _add_load(group: Any) -> None:
    add = group.add_argument
    add(
        "--clients",
        action="extend",
        type=_several(_COUNT),
        default=[],
        metavar="N,...",
        help="* closed loop: each client sends the next request after the answer (8)",
    )
    add(
        "--rate",
        action="extend",
        type=_several(_ABOVE_0),
        default=[],
        metavar="R,...",
        help="* open loop: requests per second, sent independently of the answers",
    )
    add(
        "--arrivals",
        choices=("poisson", "uniform"),
        default="poisson",
        help="of an open loop: at random, or at equal intervals (%(default)s)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of the random arrivals (%(default)s)")
    add(
        "--max-connections",
        type=_COUNT,
        default=1000,
        metavar="N",
        help="of an open loop, at the same time (%(default)s)",
    )
    add("--seconds", type=_ABOVE_0, metavar="S", help="how long to measure (10)")
    add("--requests", type=_COUNT, metavar="N", help="how many requests to measure, instead")
    add(
        "--warm-up",
        type=_NOT_NEGATIVE,
        default=1.0,
        metavar="S",
        help="seconds of load before the measurement (%(default)g)",
    )
    add("--repeat", type=_COUNT, default=1, metavar="N", help="number of runs of each point")
    add(
        "--processes",
        type=_COUNT,
        default=_processes(),
        metavar="N",
        help="of the load generator (one for each four cores: %(default)s)",
    )
    add(
        "--max-error-percent",
        type=_PERCENT,
        default=0.0,
        metavar="P",
        help="share of failed requests above which a run has failed (%(default)g); under a latency "
        "goal, refused requests are not failed ones",
    )


def _add_settings(group: Any) -> None:
    add = group.add_argument
    for row in SERVER_ROWS.values():
        only = "" if row.key in TORCHSERVES else "; marserve only"
        add(
            *(f"--{name.replace('_', '-')}" for name in row.parameters),
            action="extend",
            type=_several(_value_of(row.kind)),
            default=[],
            metavar="VALUE,...",
            help=f"* {row.help.removesuffix('.')} ({row.kind.rule}{only})",
        )
    add(
        "--workers",
        action="extend",
        type=_several(_COUNT),
        default=[],
        metavar="N,...",
        help="* processes that run the model",
    )
    add(
        "--precision",
        action="extend",
        type=_several(_name),
        default=[],
        metavar="NAME,...",
        help="* of marserve: fp32, bf16, fp16; needs --register with a path",
    )
    add(
        "--register",
        default="",
        metavar="URL",
        help="register the model from this archive, and unregister it at the end; as for "
        "POST /models: a name in the server's model store, a path, a URL",
    )


def _add_validation(group: Any) -> None:
    add = group.add_argument
    add(
        "--validate",
        action="store_true",
        help="instead of measuring, compare the answers to batched requests with those to the "
        "same requests sent alone",
    )
    add(
        "--tolerance",
        type=_ABOVE_0,
        metavar="X",
        help="accepted difference of numbers (0.0001; 0.01 in fp16, 0.05 in bf16)",
    )


def _add_tuning(group: Any) -> None:
    add = group.add_argument
    add(
        "--tune",
        type=_ABOVE_0,
        metavar="MS",
        help="search for the settings with the highest throughput within this latency; "
        "--batch-size and --workers are the largest values to try (128; the present number), "
        "and all values of --torch-threads and --outstanding-batches are tried",
    )
    add(
        "--percentile",
        type=_PERCENT,
        metavar="P",
        help="percentile of the latencies that --tune limits (99)",
    )


def _add_report(group: Any) -> None:
    add = group.add_argument
    for kind in ("json", "csv", "html"):
        add(f"--{kind}", type=Path, metavar="FILE", help=f"write the report as {kind.upper()}")
    add(
        "--output-dir",
        type=Path,
        metavar="DIR",
        help="write all three reports, named after the model and the time",
    )
    add(
        "--no-progress",
        action="store_true",
        help="no bar and no line per run",
    )


def _processes() -> int:
    return max(1, len(os.sched_getaffinity(0)) // _CORES_PER_PROCESS)


# -- values ----------------------------------------------------------------------------------------


def _several(read: Callable[[str], T]) -> Callable[[str], list[T]]:
    def read_all(text: str) -> list[T]:
        return list(dict.fromkeys(read(part.strip()) for part in text.split(",")))

    return read_all


def _value_of(kind: Kind) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = kind.parse(text)
        if not kind.accepts(value):
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not {kind.rule}")
        return value

    return read


def _number(rule: str, minimum: float, maximum: float = _LARGEST) -> Callable[[str], float]:
    def accepts(value: Any) -> bool:
        return isinstance(value, float) and minimum <= value <= maximum

    return _value_of(Kind(rule, accepts, parse=ABOVE_0.parse))


_COUNT = _value_of(whole(1, _LARGEST))
_ABOVE_0 = _number(f"{ABOVE_0.rule}, at most {_LARGEST}", 1e-6)
_NOT_NEGATIVE = _number(f"a number, 0 or more, at most {_LARGEST}", 0)
_PERCENT = _number("a number from 0 to 100", 0, 100)


def _name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9_]+", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a precision")
    return text


def _header(text: str) -> tuple[str, str]:
    match = _HEADER.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a header: NAME: VALUE")
    return match[1], match[2]


def key_of(file: Path | str, kind: str) -> str:
    """Return a key of a server's key_file.json: ``inference`` or ``management``.

    Raises:
        BenchError: The file cannot be read, or does not contain the key.
    """
    try:
        return str(json.loads(read_file(Path(file)))[kind]["key"])
    except OSError as error:
        raise BenchError(f"Cannot read the keys in {file}: {error.strerror}.") from None
    except (ValueError, LookupError, TypeError, RecursionError):
        raise BenchError(f"{file} is not a key_file.json of a server.") from None
