"""The warnings and notes about a configuration, for whoever starts a server."""

from collections.abc import Iterator, Mapping

from marserve.frontend.configuration.config import KEYS, LOG4J_FILE, Config
from marserve.frontend.configuration.config_file import Assignment, ConfigFile
from marserve.frontend.configuration.models_key import unread_model_settings
from marserve.frontend.configuration.unread_keys import HARMLESS, RECORDS, unread_key


def warnings(config: Config, settings: Mapping[str, Assignment], file: ConfigFile) -> Iterator[str]:
    """What the operator should act on, sentence by sentence.

    Args:
        config: As it is resolved.
        settings: What was set, by key.
        file: Where most of it stands.
    """
    for name in sorted(file.raw.keys() - file.settings.keys()):
        yield f"{name} ({file.path}) is ignored: TorchServe wrote its own into its snapshots."
    models = settings.get("load_models")
    if config.model_snapshot is not None and models and models.origin != str(file.path):
        yield (
            f"load_models={models.text} ({models.place}) is ignored: the models are those of "
            f"the model_snapshot in {file.path}."
        )
    supported = KEYS.keys() | RECORDS
    for name, setting in settings.items():
        if name not in supported | HARMLESS:
            yield unread_key(name, setting.place, supported - RECORDS)
    if "models" in settings:
        yield from unread_model_settings(settings["models"].text)
    yield from _unread_tls_keys(config, settings)
    if not config.is_private:
        yield from _any_url(config, settings)


def _harmless(config: Config, settings: Mapping[str, Assignment]) -> Iterator[str]:
    """What an ordinary configuration of TorchServe has, and needs no action."""
    for name in sorted(settings.keys() & HARMLESS):
        yield unread_key(name, settings[name].place, ())
    for option in config.vmargs:
        if not LOG4J_FILE.fullmatch(option):
            place = settings["vmargs"].place
            yield f"vmargs ({place}): {option} has no effect: there is no Java virtual machine."
    if config.is_private:
        yield from _any_url(config, settings)


def _any_url(config: Config, settings: Mapping[str, Assignment]) -> Iterator[str]:
    if "allowed_urls" not in settings and config.model_api:
        yield "Models may be registered from any URL, because allowed_urls is not set."


def _unread_tls_keys(config: Config, settings: Mapping[str, Assignment]) -> Iterator[str]:
    pem = ("private_key_file", "certificate_file")
    store = ("keystore", "keystore_pass", "keystore_type")
    if not config.has_https:
        unread, reason = {*pem, *store}, "no listener is https"
    elif config.keystore is not None:
        unread, reason = set(pem), "keystore is set"
    else:
        unread, reason = set(store), "keystore is not set"
    for name in sorted(unread & settings.keys()):
        yield f"{name} ({settings[name].place}) has no effect: {reason}."
    if config.has_https and not config.tls_files.are_configured:
        alone = [name for name in pem if name in settings]
        reason = "neither keystore nor certificate_file is set"
        if alone:
            reason = f"{alone[0]} alone is not enough, {' and '.join(pem)} go together"
        yield f"https uses a self-signed certificate: {reason}."


def notes(config: Config, settings: Mapping[str, Assignment], file: ConfigFile) -> Iterator[str]:
    """What the operator should know; see `warnings`."""
    yield f"Configuration file: {file.path.absolute() if file.path else 'none'}."
    if file.passed_over is not None:
        snapshot = file.passed_over.absolute()
        yield (
            f"The models are those of --models. The newest snapshot, {snapshot}, is passed over "
            "with its configuration; start without --models to restore it."
        )
    yield from _harmless(config, settings)
    tokens, model_api = config.token_authorization, config.model_api
    chosen = config.disable_token_authorization
    yield _switch("Token authorization", tokens, "disable_token_authorization", chosen, config)
    chosen = config.enable_model_api
    yield _switch("Registering models over HTTP", model_api, "enable_model_api", chosen, config)


def _switch(what: str, is_on: bool, key: str, chosen: bool | None, config: Config) -> str:
    state = f"{what} is {'on' if is_on else 'off'}"
    if chosen is not None:
        return f"{state}: {key}={str(chosen).lower()}."
    reached = "every listener is" if config.is_private else "not every listener is"
    where = "loopback or a unix socket" if config.has_unix else "loopback"
    return f"{state}: {key} is not set and {reached} bound to {where}. Set it to decide yourself."
