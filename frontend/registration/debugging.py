"""``--debug-handler``: one model is served by a worker that has the terminal.

What such a worker does stands in `marserve.backend.debugging`; here, how the server is set up for
it. Answers hold tracebacks, thus code, and whatever an exception's message holds. So only this
machine may reach the server, and web pages in a browser of this machine are kept from all of it,
not only from management.

The terminal sends Ctrl-C to the server and to the worker at once. The server leaves it to the
worker, which alone knows whether its handler runs: clearing a line at a prompt ends no server.
"""

import logging
from dataclasses import replace
from pathlib import Path

from marserve.frontend.configuration.config import Config, Debugged
from marserve.frontend.configuration.properties import ConfigError
from marserve.frontend.registration.resolver import handler_path
from marserve.frontend.serving.registry import ModelRegistry
from marserve.frontend.workers.terminal import Terminal

logger = logging.getLogger(__name__)


def for_debugging(config: Config, model: str, *, foreground: bool) -> Config:
    """The configuration of a server under which a handler is debugged.

    ``model`` is a name, or ``NAME=HANDLER`` with a file in the place of the archive's.

    Raises:
        ConfigError: No handler can be debugged so.
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
        raise ConfigError("--debug-handler needs a terminal, and there is none.") from error
    if not terminal.is_ours:
        raise ConfigError("--debug-handler needs the terminal: do not start it in the background.")
    # A snapshot would have the next server start this way; and nobody waits for a breakpoint.
    return replace(
        config,
        debugged=Debugged(name, handler_path(handler)),
        drain_timeout=0.0,
        lame_duck_seconds=0.0,
        snapshots_kept=0,
    )


def warn_if_unknown(debugged: Debugged, registry: ModelRegistry) -> None:
    """Log that there is nothing to debug yet: the name may be mistyped."""
    names = sorted({model.name for model in registry})
    if debugged.model not in names:
        there_are = f"there are {', '.join(names)}" if names else "there are none"
        logger.warning(
            "--debug-handler: no model %s is registered yet; %s.", debugged.model, there_are
        )


def leaves_interrupts(registry: ModelRegistry) -> bool:
    """Whether Ctrl-C is left to a worker whose handler is debugged."""
    return any(worker.takes_interrupts for model in registry for worker in model.workers)
