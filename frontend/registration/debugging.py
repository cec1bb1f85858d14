"""The server's part of ``--debug-handler``: a worker of one model has the terminal.

Answers contain tracebacks, and with them code. So only programs of this machine can reach the
server, and no web page in its browsers.
"""

import logging
from dataclasses import replace
from pathlib import Path

from marserve.frontend.configuration.config import Config, Debugged
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.workers.terminal import Terminal

logger = logging.getLogger(__name__)


def for_debugging(config: Config, model: str, *, foreground: bool) -> Config:
    """Return the configuration of a server for debugging.

    ``model`` is a name, or ``NAME=HANDLER`` with a file that replaces the archive's handler.

    Raises:
        ConfigError: A handler cannot be debugged this way.
    """
    name, equals, handler = model.partition("=")
    if not foreground:
        raise ConfigError("--debug-handler needs --foreground: the debugger is in the terminal.")
    for address in (*config.listeners, *config.grpc_listeners):
        if not address.is_private:
            raise ConfigError(
                f"--debug-handler needs listeners on loopback, and one is {address.url}: answers "
                "show code."
            )
    if not name or (equals and not Path(handler.partition(":")[0]).is_file()):
        raise ConfigError(f"--debug-handler {model}: expected MODEL or MODEL=FILE.")
    try:
        terminal = Terminal()
    except OSError as error:
        raise ConfigError("--debug-handler needs a terminal.") from error
    if not terminal.is_ours:
        raise ConfigError("--debug-handler needs the terminal: do not start it in the background.")
    # No snapshot, with which the next server would start this way; no wait for breakpoints at stop.
    return replace(
        config,
        debugged=Debugged(name, handler_path(handler)),
        drain_timeout=0.0,
        lame_duck_seconds=0.0,
        snapshots_kept=0,
    )


def handler_path(text: str) -> str:
    """Return a handler of a command line; an existing file by its absolute path."""
    file, colon, function = text.partition(":")
    return f"{Path(file).absolute()}{colon}{function}" if Path(file).is_file() else text


def warn_if_unknown(debugged: Debugged, registry: ModelRegistry) -> None:
    """Log that the model is not registered yet: its name may be mistyped."""
    names = sorted({model.name for model in registry})
    if debugged.model not in names:
        there_are = f"there are {', '.join(names)}" if names else "there are none"
        logger.warning(
            "--debug-handler: no model %s is registered yet; %s.", debugged.model, there_are
        )


def leaves_interrupts(registry: ModelRegistry) -> bool:
    """Return whether a debugged worker handles Ctrl-C, which the server gets, too."""
    return any(worker.takes_interrupts for model in registry for worker in model.workers)
