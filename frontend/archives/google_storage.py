"""Make requests for objects in Google Cloud Storage, ``gs://bucket/object``.

The metadata server of Google Cloud returns the token of the machine's service account. Elsewhere
the request has no token. As in Google's libraries, ``STORAGE_EMULATOR_HOST`` and
``GCE_METADATA_HOST`` are the addresses of other servers.
"""

import http.client
import json
import os
from collections.abc import Mapping
from urllib.parse import quote, unquote

from marserve.frontend.archives.s3 import bucket_and_key
from marserve.frontend.socket_deadline import socket_deadline

_TOKEN_SECONDS = 3.0
_TOKEN = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - a path


def authorised_request(
    url: str, environ: Mapping[str, str] = os.environ
) -> tuple[str, Mapping[str, str]]:
    """Return the URL of an object, and the headers of a GET request for it; blocks.

    The headers are for this URL only, not for the target of a redirect.
    """
    bucket, key = bucket_and_key(url)
    endpoint = environ.get("STORAGE_EMULATOR_HOST") or "https://storage.googleapis.com"
    if "://" not in endpoint:
        endpoint = f"http://{endpoint}"
    place = f"{endpoint.rstrip('/')}/{bucket}/{quote(unquote(key), safe='/-_.~')}"
    token = _token(environ.get("GCE_METADATA_HOST") or "metadata.google.internal")
    return place, {"Authorization": f"Bearer {token}"} if token else {}


def _token(host: str) -> str:
    """Return the token of this machine; empty without one."""
    connection = http.client.HTTPConnection(host, timeout=_TOKEN_SECONDS)
    try:
        connection.connect()
        opened = connection.sock
        with socket_deadline(_TOKEN_SECONDS, lambda: opened):
            connection.request("GET", _TOKEN, headers={"Metadata-Flavor": "Google"})
            answer = connection.getresponse()
            # Another server of this name, in another network, does not send the header.
            if answer.status != 200 or answer.getheader("Metadata-Flavor") != "Google":
                return ""
            token = json.loads(answer.read(1 << 16)).get("access_token")
    except (OSError, http.client.HTTPException, ValueError, AttributeError, RecursionError):
        return ""
    finally:
        connection.close()
    return token if isinstance(token, str) and token.isprintable() else ""
