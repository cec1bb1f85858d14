"""Who is compared: every file in ``adapters/``."""

import importlib.util
from pathlib import Path

from contract import Peer

_ADAPTERS = Path(__file__).with_name("adapters")


def peers() -> list[Peer]:
    """All of them, we first."""
    found = [_peer(path) for path in sorted(_ADAPTERS.glob("*.py"))]
    return sorted(found, key=lambda peer: peer.name != "marserve")


def _peer(path: Path) -> Peer:
    """Load by path, not by name: the files are called after the packages they are about."""
    spec = importlib.util.spec_from_file_location(f"adapter_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    peer: Peer = module.PEER
    return peer
