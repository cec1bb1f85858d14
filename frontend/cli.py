"""The command line: TorchServe's flags to a `Config`, then start, stop or run.

``--start`` starts a detached server (`daemon`) and returns when that listens, has failed, or takes
longer; ``--foreground`` is the server. Both check the configuration first, so that a mistake is
reported where the command was typed.

Under the name ``torchserve`` it replaces TorchServe's command: without flags it starts, and
``--version`` adds the line that scripts read, with TorchServe's version.

Unlike TorchServe, ``--stop`` waits until the server has ended, and the exit code of a server that
was stopped is 0, not 1.

A command's modules are imported when it is selected, since the server's take long.
"""

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from marserve.frontend.configuration.config import Config
from marserve.frontend.configuration.config_file import SNAPSHOT_FOLDER
from marserve.frontend.configuration.loading import load_config
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.lifecycle.daemon import StartReport, become_server, claim, start, stop
from marserve.frontend.lifecycle.pidfile import PidFile, PidFileError
from marserve.frontend.lifecycle.terminal import print_text
from marserve.frontend.logs.setup import log_directories

_DROP_IN = "torchserve"
#: Modules of the commands `marserve NAME`.
PROGRAMS = {
    "pack": "marserve.tools.archiver.archiver",
    "bench": "marserve.tools.bench.main",
    "doctor": "marserve.tools.doctor.main",
    "run": "marserve.frontend.run_model",
    "ready": "marserve.tools.ready",
    "demo": "marserve.tools.demo.main",
}
_COMMANDS = ("serve", *PROGRAMS)


def main(argv: Sequence[str] | None = None, program: str = "marserve") -> int:
    """Run a command line, by default this process's; return the exit code.

    ``program`` is the name of the command; ``torchserve`` selects TorchServe's behaviour.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments and program != _DROP_IN:
        build_parser().print_help()
        return 0
    if arguments and arguments[0] in PROGRAMS:
        # By name: the server does not import the tools.
        module = importlib.import_module(PROGRAMS[arguments[0]])
        return module.main(arguments[1:]) or 0
    options = build_parser(program).parse_args(arguments)
    options.foreground |= options.command == "serve"
    if options.version:
        return _print_version(program)
    try:
        return _run(options, arguments)
    except (ConfigError, PidFileError) as error:
        print_text(str(error))
        return 1


def build_parser(program: str = "marserve") -> argparse.ArgumentParser:
    """Return the parser of the flags."""
    parser = argparse.ArgumentParser(
        prog=program,
        description="Serves PyTorch models to TorchServe's clients.",
        epilog="marserve pack [...] writes model archives, marserve run MODEL [...] runs a handler "
        "without a server, marserve bench MODEL [...] measures a model that is served, marserve "
        "ready checks the running server, marserve doctor [...] checks what a move from TorchServe "
        "needs, marserve demo serves a small model to try; each has a --help.",
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version")
    action.add_argument("--start", action="store_true", help="start the server (the default)")
    action.add_argument("--stop", action="store_true", help="stop the server and wait for its end")
    option, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    commands = (
        "serve, of SageMaker's containers, is the same as --foreground; the others come first and "
        "are described below"
    )
    names = f"{{{','.join(_COMMANDS)}}}"
    option("command", nargs="?", type=_command, metavar=names, help=commands)
    switch("--foreground", help="run the server in this process, do not detach")
    debugging = (
        "give one worker of a model the terminal: breakpoint() works, edited files are loaded "
        "again, answers contain tracebacks; FILE replaces the archive's handler"
    )
    option("--debug-handler", metavar="MODEL[=FILE]", help=debugging)
    option("--ts-config", metavar="FILE", help="configuration file")
    option("--model-store", metavar="DIR", help="directory with the model archives")
    models = "what to load at start: all, FILE.mar, NAME=FILE.mar or a URL"
    option("--models", nargs="+", metavar="MODEL", help=models)
    option("--workflow-store", metavar="DIR", help="directory with the workflow archives")
    logs = "logging configuration: Python's (.yaml, .json), or log4j 2's (.xml, .properties)"
    option("--log-config", metavar="FILE", help=logs)
    option("--cpp-log-config", metavar="FILE", help="no effect: the backend has no C++")
    option("--plugins-path", "--ppath", metavar="PATHS", help="no effect: the server has no Java")
    snapshots = "write no snapshots of the served models, and do not restore the newest one"
    switch("--no-config-snapshots", "--ncs", help=snapshots)
    switch("--disable-token-auth", "--dt", help="do not require tokens")
    switch("--enable-model-api", help="let clients register models")
    platform = "kserve, sagemaker, vertex or none; detected without this flag"
    option("--platform", metavar="NAME", help=platform)
    switch("--verbose", help="print all records of the log file on the console, too")
    for inner in ("--pid-descriptor", "--report-descriptor"):  # of the starter
        option(inner, type=int, help=argparse.SUPPRESS)
    option("--server-argument", help=argparse.SUPPRESS)  # for those who list processes
    return parser


def _command(word: str) -> str:
    if word == "serve":
        return word
    if word in PROGRAMS:
        raise argparse.ArgumentTypeError(f"{word} must be the first argument")
    alike = difflib.get_close_matches(word, _COMMANDS, n=1)
    meant = f"did you mean {alike[0]}?" if alike else f"choose from {', '.join(_COMMANDS)}"
    raise argparse.ArgumentTypeError(f"there is no command {word!r}; {meant}")


def load_config_of(options: argparse.Namespace) -> Config:
    """Return the configuration by the flags, the files and the environment of this process.

    Raises:
        ConfigError: It is invalid.
    """
    snapshots = None if options.no_config_snapshots else log_directories()[0] / SNAPSHOT_FOLDER
    flags = dict(_flags(options))
    return load_config(flags, options.ts_config, snapshots=snapshots, platform=options.platform)


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.stop:
        return stop(_time_to_stop(options))
    _check_paths(options)
    config = load_config_of(options)
    if options.debug_handler:
        from marserve.frontend.registration.debugging import for_debugging

        config = for_debugging(config, options.debug_handler, foreground=options.foreground)
    argument = config.platform.setup.server_argument
    if argument and not options.server_argument:
        become_server(arguments, argument)
    if options.foreground:
        return _serve(config, options)
    return start(arguments, config.inference_address.url)


def _print_version(program: str) -> int:
    from marserve.frontend.version import TORCHSERVE_VERSION, __version__

    print_text(f"marserve {__version__} (TorchServe-compatible)")
    if program == _DROP_IN:
        print_text(f"TorchServe Version is {TORCHSERVE_VERSION}")
    return 0


def _check_paths(options: argparse.Namespace) -> None:
    for flag in ("log_config", "cpp_log_config"):
        path = getattr(options, flag)
        if path and not Path(path).is_file():
            raise ConfigError(f"--{flag.replace('_', '-')} file not found: {path}")
    store = options.workflow_store
    if store and not Path(store).is_dir():
        raise ConfigError(f"--workflow-store directory not found: {store}")


def _flags(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
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
    report = StartReport(options.report_descriptor)
    try:
        return _serve_until_stopped(config, options, report)
    except Exception as error:
        # Defects and broken libraries end with a traceback; the starter gets the reason.
        kind = "" if isinstance(error, ConfigError | PidFileError) else f"{type(error).__name__}: "
        report.failed(f"{kind}{error}")
        raise


def _serve_until_stopped(config: Config, options: argparse.Namespace, report: StartReport) -> int:
    pid_file = PidFile()
    if options.pid_descriptor is None:
        claim(pid_file)
    else:
        pid_file.adopt(options.pid_descriptor)
    try:
        if options.report_descriptor is not None:
            report.pipes.take()
        from marserve.frontend.server import serve

        return serve(config, report, verbose=options.verbose, pid_file=pid_file)
    finally:
        pid_file.release()


def _time_to_stop(options: argparse.Namespace) -> float:
    try:
        config = load_config_of(options)
    except ConfigError:
        # The flags of the start need not be repeated.
        config = Config(model_store=Path())
    return config.stop_seconds
