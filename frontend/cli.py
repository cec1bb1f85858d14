"""The command line: TorchServe's flags to a `Config`, then start, stop or run.

``--start`` leaves a detached server behind and returns when that listens, could not start, or takes
its time; ``--foreground`` is the server. In both the configuration is checked first, so a mistake
is reported where the command was typed.

Under the name ``torchserve`` it is TorchServe's drop-in: without flags it starts, and ``--version``
adds the line that scripts read, with the version of TorchServe whose contract is kept. Under our
own name a bare command prints the help.

Unlike TorchServe: ``--stop`` waits until the server is gone, also without ``--foreground``; the
exit code of a server that was stopped in order is 0, not 1.

What a command does is imported once it is known which it is: the server's imports take a while.
"""

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.config_file import SNAPSHOT_FOLDER
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.logs.setup import log_directories
from marserve.frontend.pidfile import PidFile, PidFileError
from marserve.frontend.start_report import Outcome, StartReport, wait_for_outcome

_DROP_IN = "torchserve"
_START_SECONDS = 10.0  # how long a starter waits for its server to listen
_INTERRUPTED = 130  # the status, for shells, of a command that Ctrl-C ended
_PROGRAMS = {
    "pack": "marserve.tools.archiver.archiver",
    "bench": "marserve.tools.bench.main",
    "run": "marserve.frontend.run_model",
}
_STOP_GRACE = 30.0  # seconds that a stop may take beyond those that the server waits for others


def main(argv: Sequence[str] | None = None, program: str = "marserve") -> int:
    """Runs the command line.

    Args:
        argv: The arguments; by default those of the process.
        program: The name of the command: ``torchserve`` for TorchServe's ways.

    Returns:
        The exit code of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments and program != _DROP_IN:
        build_parser().print_help()
        return 0
    if arguments and arguments[0] in _PROGRAMS:
        # By name at run time: tools stand beside the server, which does not import them.
        module = importlib.import_module(_PROGRAMS[arguments[0]])
        return module.main(arguments[1:]) or 0
    options = build_parser(program).parse_args(arguments)
    if options.version:
        return _print_version(program)
    try:
        return _run(options, arguments)
    except (ConfigError, PidFileError) as error:
        _print(str(error))
        return 1


def build_parser(program: str = "marserve") -> argparse.ArgumentParser:
    """Builds the parser of TorchServe's flags.

    Args:
        program: The name of the command, for its usage.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        description="Serves PyTorch models to TorchServe's clients.",
        epilog="marserve pack [...] writes model archives, marserve run MODEL [...] runs a handler "
        "without a server, marserve bench MODEL [...] measures a model that is served; each has a "
        "--help.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version")
    action.add_argument("--start", action="store_true", help="start the server (the default)")
    action.add_argument("--stop", action="store_true", help="stop the server and wait for its end")
    parser.add_argument("--foreground", action="store_true", help="be the server, do not detach")
    parser.add_argument(
        "--debug-handler",
        metavar="MODEL[=FILE]",
        help="give one worker of a model the terminal: breakpoint() works, edited files are loaded "
        "anew, answers hold tracebacks; FILE replaces the archive's handler",
    )
    _add_files(parser)
    _add_switches(parser)
    return parser


def _add_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ts-config", metavar="FILE", help="configuration file")
    parser.add_argument("--model-store", metavar="DIR", help="directory with the model archives")
    parser.add_argument(
        "--models",
        nargs="+",
        metavar="MODEL",
        help="what to load at start: all, FILE.mar, NAME=FILE.mar or a URL",
    )
    parser.add_argument("--workflow-store", metavar="DIR", help="not supported yet")
    parser.add_argument(
        "--log-config",
        metavar="FILE",
        help="logging configuration: Python's (.yaml, .json), or log4j's (.xml, .properties)",
    )
    parser.add_argument(
        "--cpp-log-config", metavar="FILE", help="no effect: there is no C++ backend"
    )
    parser.add_argument(
        "--plugins-path", "--ppath", metavar="PATHS", help="no effect: there is no Java"
    )


def _add_switches(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-config-snapshots",
        "--ncs",
        action="store_true",
        help="write no snapshots of what is served, and do not restore the newest one",
    )
    parser.add_argument(
        "--disable-token-auth", "--dt", action="store_true", help="ask nobody for a token"
    )
    parser.add_argument(
        "--enable-model-api", action="store_true", help="let clients register models"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show on the console what else only the log file has"
    )
    for inner in ("--pid-descriptor", "--report-descriptor"):  # from the starter
        parser.add_argument(inner, type=int, help=argparse.SUPPRESS)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.stop:
        return _stop(options)
    _check_paths(options)
    config = _load_config(options)
    if options.debug_handler:
        from marserve.frontend.debugging import for_debugging

        config = for_debugging(config, options.debug_handler, foreground=options.foreground)
    if options.foreground:
        return _serve(config, options)
    return _start(arguments, config)


def _print_version(program: str) -> int:
    from marserve.frontend.version import TORCHSERVE_VERSION, __version__

    _print(f"marserve {__version__} (TorchServe-compatible)")
    if program == _DROP_IN:
        _print(f"TorchServe Version is {TORCHSERVE_VERSION}")
    return 0


def _check_paths(options: argparse.Namespace) -> None:
    for flag in ("log_config", "cpp_log_config"):
        path = getattr(options, flag)
        if path and not Path(path).is_file():
            raise ConfigError(f"--{flag.replace('_', '-')} file not found: {path}")
    store = options.workflow_store
    if store and not Path(store).is_dir():
        raise ConfigError(f"--workflow-store directory not found: {store}")


def _load_config(options: argparse.Namespace) -> Config:
    snapshots = None if options.no_config_snapshots else log_directories()[0] / SNAPSHOT_FOLDER
    return load_config(dict(_flags(options)), options.ts_config, snapshots=snapshots)


def _flags(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yields what the command line sets, as keys and texts of the properties file."""
    for key in ("model_store", "workflow_store", "log_config", "cpp_log_config", "plugins_path"):
        if text := getattr(options, key):
            yield key, text
    if options.models:
        yield "load_models", ",".join(options.models)
    if options.disable_token_auth:
        yield "disable_token_authorization", "true"
    if options.enable_model_api:
        yield "enable_model_api", "true"
    if options.no_config_snapshots:
        yield "snapshots_kept", "0"


def _serve(config: Config, options: argparse.Namespace) -> int:
    from marserve.frontend.server import serve

    pid_file = PidFile()
    if options.pid_descriptor is None:
        _claim(pid_file)
    else:
        pid_file.adopt(options.pid_descriptor)
    try:
        return serve(config, StartReport(options.report_descriptor), verbose=options.verbose)
    finally:
        pid_file.release()


def _claim(pid_file: PidFile) -> None:
    if pid_file.claim():
        _print("Removing orphan pid file.")


def _start(arguments: list[str], config: Config) -> int:
    """Leaves a server behind, and prints what became of it."""
    pid_file = PidFile()
    _claim(pid_file)
    report, inherited = os.pipe()
    try:
        server = subprocess.Popen(  # noqa: S603  our own interpreter, the operator's own flags
            _server_command([*arguments, "--foreground"], pid_file.fileno(), inherited),
            stdin=subprocess.DEVNULL,
            pass_fds=[pid_file.fileno(), inherited],
            start_new_session=True,
        )
    except BaseException:
        pid_file.release()
        raise
    os.close(inherited)  # else we would never see the end of a server that dies
    pid_file.hand_over(server.pid)
    try:
        outcome = wait_for_outcome(report, _START_SECONDS)
    except KeyboardInterrupt:
        server.returncode = 0
        _print("\nThe server goes on starting; --stop ends it.")
        return _INTERRUPTED
    if outcome is not None and not outcome.url:
        end = _end_of(server)  # not before it is gone: the next start should find nothing
        _print(f"The server did not start: {outcome.error or end}")
        return 1
    server.returncode = 0  # it lives on by intent: no "still running" warning when we go
    _print(_progress(outcome, config.inference_address.url))
    return 0


def _progress(outcome: Outcome | None, url: str) -> str:
    """A sentence on how far a server is that goes on by itself."""
    if outcome is None:
        return f"The server is still loading models; {_where_to_ask(url)}."
    listens = f"The server listens at {outcome.url}"
    if outcome.failed:
        names = ", ".join(outcome.failed)
        return f"{listens}, but models could not be loaded ({names}); see its log."
    if outcome.loading:
        names = ", ".join(outcome.loading)
        return f"{listens} and is still loading models ({names}); {_where_to_ask(outcome.url)}."
    return f"{listens}."


def _where_to_ask(url: str) -> str:
    return f"ask {url} for /ready" if url.startswith("unix:") else f"ask {url}/ready"


def _end_of(server: "subprocess.Popen[bytes]") -> str:
    """How a server ends that did not start."""
    try:
        status = server.wait(_STOP_GRACE)
    except subprocess.TimeoutExpired:
        server.returncode = 0
        return "it hangs."
    log = log_directories()[0].absolute() / "ts_log.log"
    if status == 0:
        return "it was told to stop."
    if status < 0:
        return f"it was killed by {signal.Signals(-status).name}."
    return f"it ended with status {status}; {log} may tell why."


def _server_command(arguments: list[str], pid_descriptor: int, report_descriptor: int) -> list[str]:
    # -m puts the working directory first on the import path, where a model author's logging.py
    # may lie; -P does not.
    inner = ["--pid-descriptor", str(pid_descriptor), "--report-descriptor", str(report_descriptor)]
    return [sys.executable, "-P", "-m", "marserve.frontend", *arguments, *inner]


def _stop(options: argparse.Namespace) -> int:
    pid = PidFile().read()
    if pid is None:
        _print("TorchServe is not currently running.")
        return 0
    if not _end(pid, _time_to_stop(options) + _STOP_GRACE):
        _print("Stopping TorchServe took too long.")
        return 1
    _remove_orphan()
    _print("TorchServe has stopped.")
    return 0


def _remove_orphan() -> None:
    """A server that was stopped in its first moments had no chance to remove its pid file."""
    pid_file = PidFile()
    with contextlib.suppress(PidFileError):  # the next server has it already
        pid_file.claim()
        pid_file.release()


def _time_to_stop(options: argparse.Namespace) -> float:
    """How long the server may wait for others, as far as can be known from here."""
    try:
        config = _load_config(options)
    except ConfigError:
        # To stop a server one need not repeat the flags it was started with.
        config = Config(model_store=Path())
    return config.lame_duck_seconds + config.drain_timeout


def _end(pid: int, timeout: float) -> bool:
    """Asks a process to end; returns whether it did within ``timeout`` seconds."""
    try:
        server = psutil.Process(pid)
        server.terminate()
    except psutil.NoSuchProcess:
        return True
    deadline = time.monotonic() + timeout
    while _is_alive(server):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _is_alive(process: psutil.Process) -> bool:
    try:
        # A container without an init leaves zombies, which psutil counts as running.
        return process.is_running() and process.status() != "zombie"
    except psutil.NoSuchProcess:
        return False


def _print(sentence: str) -> None:
    print(sentence)  # noqa: T201  the command line's answers; scripts read TorchServe's on stdout
