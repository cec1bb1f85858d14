"""KServe: its ports, and no tokens. It takes the place of TorchServe and of KServe's wrapper.

The ports are bound when all models are loaded, because a pod gets requests as soon as KServe can
connect to 8080. The wrapper forwarded their requests to TorchServe at 8085.

The management API needs no key, because KServe's clients have none. It is bound to loopback, and so
is inference if both share an address, as in KServe's examples.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from marserve.frontend.configuration.addresses import Address, UnixAddress
from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.platforms.platform import Change, Platform, Setup, Surroundings

_MOUNT = Path("/mnt/models")
_FROM_KSERVE = ("TS_SERVICE_ENVELOPE", "PROTOCOL_VERSION")

_HTTP = Address("0.0.0.0", 8080)  # noqa: S104 - requests come from outside of the pod
_GRPC = Address("0.0.0.0", 8081, "grpc")  # noqa: S104
_OWN_PORTS = (_HTTP.port, _GRPC.port)
_LOOPBACK = "127.0.0.1"
_METRICS = "http://0.0.0.0:8082"
_GRPC_PORTS = {"grpc_inference_port": "7070", "grpc_management_port": "7071"}
_MAKE_ROOM = "for KServe's ports are its own"


def _evidence(surroundings: Surroundings) -> str:
    """Look for KServe's directory and its variables; one alone may be chance."""
    variables = [name for name in _FROM_KSERVE if name in surroundings.environ]
    store = surroundings.settings.get("model_store")
    places = [surroundings.config_file, Path(store) if store else None]
    mounted = [path for path in places if path is not None and path.is_relative_to(_MOUNT)]
    if not variables or not mounted:
        return ""
    return f"{mounted[0]} lies where KServe mounts models, and {variables[0]} is set"


def _set_up(surroundings: Surroundings) -> Setup:
    settings = surroundings.settings
    changes = (*_changes(), *_moves(settings, surroundings.decided))
    has_grpc = settings.get("enable_grpc", "true").lower() == "true"
    return Setup(changes, (_HTTP,), (_GRPC,) if has_grpc else ())


def _changes() -> Iterator[Change]:
    yield Change("disable_token_authorization", "true", "for the clients of KServe have no tokens")
    yield Change("ts_open_inference_protocol", "true", "for KServe offers that protocol")
    yield Change("metrics_address", _METRICS, "where KServe has them read", "default")


def _moves(settings: Mapping[str, str], decided: frozenset[str]) -> Iterator[Change]:
    """Move listeners away from KServe's ports, and bind management to loopback.

    An operator may choose another address, but not one of KServe's ports.
    """
    for key, port in _GRPC_PORTS.items():
        if settings.get(key, port) in (str(own) for own in _OWN_PORTS):
            yield Change(key, port, _MAKE_ROOM, "forced")
    with suppress(ValueError):  # the later check of the file reports it
        inference = _away(settings, "inference_address", 8085)
        management = _away(settings, "management_address", 8086)
        if "management_address" not in decided:
            management = _inside(management)
        if isinstance(inference, Address) and isinstance(management, Address):
            is_shared = inference.port == management.port
            inference = replace(inference, host=management.host) if is_shared else inference
        yield Change("inference_address", inference.url, _MAKE_ROOM, "forced")
        yield Change("management_address", management.url, "for it stays in the pod", "forced")
        metrics = KEYS["metrics_address"].from_text(settings.get("metrics_address") or _METRICS)
        if isinstance(metrics, Address) and metrics.port in _OWN_PORTS:
            yield Change("metrics_address", _METRICS, _MAKE_ROOM, "forced")


def _away(settings: Mapping[str, str], key: str, port: int) -> Address | UnixAddress:
    """Return the address of a listener, at a new port if it has one of KServe's."""
    row = KEYS[key]
    address: Address | UnixAddress = row.from_text(settings.get(key) or row.default)
    if isinstance(address, Address) and address.port in _OWN_PORTS:
        return replace(address, host=_LOOPBACK, port=port)
    return address


def _inside(address: Address | UnixAddress) -> Address | UnixAddress:
    if isinstance(address, UnixAddress) or address.is_private:
        return address
    return replace(address, host=_LOOPBACK)


KSERVE = Platform("kserve", "KServe", _evidence, _set_up)
