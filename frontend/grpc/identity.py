"""The key and certificates of gRPC listeners with TLS, which can be read again."""

from collections.abc import Callable
from typing import Any

import grpc

from marserve.frontend.configuration.addresses import TlsFiles
from marserve.frontend.configuration.tls import identity_pem


class TlsIdentity:
    """Key and certificates of the server; making it reads them, or raises ConfigError."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._current = self._read()

    def reload(self) -> None:
        """Read the files again, for connections to come; with a ConfigError the old ones stay."""
        if self._files.are_configured:
            self._current = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a listener."""
        return grpc.dynamic_ssl_server_credentials(self._current, self._news())

    def _news(self) -> Callable[[], Any]:
        """Return the function that grpc calls at each handshake; it returns new files, or None."""
        known = self._current

        def fetch() -> Any:
            nonlocal known
            if known is self._current:
                return None
            known = self._current
            return known

        return fetch

    def _read(self) -> Any:
        return grpc.ssl_server_certificate_configuration([identity_pem(self._files)])
