"""Sign requests for objects in S3.

botocore (the extra ``s3``) signs with the credentials that AWS's programs use: of the
environment, profiles, and roles of machines and containers.

The region is ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, else that of the profile, else us-east-1.
``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` is the address of another server for ``s3://``.
"""

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from marserve.frontend.configuration.values import without_secrets
from marserve.frontend.errors import DownloadFailed, ModelNotFound

_NONE: Mapping[str, str] = {}
_BUCKET = re.compile(r"[\w.-]+", re.ASCII)


class Signer:
    """Signs requests with this machine's credentials, which it keeps and renews."""

    def __init__(self) -> None:
        self._session: Any = None  # botocore's

    def sign(self, url: str, headers: Mapping[str, str] = _NONE) -> tuple[str, Mapping[str, str]]:
        """Return the signed URL and all headers of a GET request for a URL; blocks.

        The URL is one of S3, or an http(s) URL that leads there.

        The headers are for this URL only, not for the target of a redirect.

        Raises:
            DownloadFailed: There are no credentials, or botocore is not installed.
        """
        failed = f"Failed to download archive from: {without_secrets(url)}: no AWS credentials;"
        remedy = "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_DEFAULT_REGION"
        try:
            from botocore.auth import S3SigV4Auth
            from botocore.awsrequest import AWSRequest
            from botocore.exceptions import BotoCoreError
            from botocore.session import Session
        except ImportError as error:
            raise DownloadFailed(
                f"{failed} install botocore (pip install botocore), which reads and uses them, "
                f"and {remedy}, or a profile or role."
            ) from error
        try:
            self._session = session = self._session or Session()
            credentials = session.get_credentials()
            region = (
                os.environ.get("AWS_REGION")
                or session.get_config_variable("region")  # reads AWS_DEFAULT_REGION
                or "us-east-1"
            )
            if credentials is None:
                raise DownloadFailed(
                    f"{failed} {remedy}, or a profile or role that botocore finds."
                )
            place = object_url(url, region) if urlsplit(url).scheme == "s3" else url
            request = AWSRequest("GET", _canonical(place), headers)
            S3SigV4Auth(credentials.get_frozen_credentials(), "s3", region).add_auth(request)
        except BotoCoreError as error:
            raise DownloadFailed(f"{failed} botocore says: {error}") from error
        return request.url, dict(request.headers.items())


def object_url(url: str, region: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the https URL of ``s3://bucket/key``."""
    bucket, key = bucket_and_key(url)
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        place = f"{endpoint.rstrip('/')}/{bucket}"
    else:
        host = f"s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")
        # The wildcard certificate of S3 does not cover bucket names with dots.
        place = f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}"
    query = urlsplit(url).query
    return f"{place}/{key}" + (f"?{query}" if query else "")


def bucket_and_key(url: str) -> tuple[str, str]:
    """Return the bucket and the key of an s3 or gs URL; raises ModelNotFound without them."""
    parts = urlsplit(url)
    bucket, key = parts.netloc, parts.path.removeprefix("/")
    if not key or not _BUCKET.fullmatch(bucket):
        raise ModelNotFound(f"Model not found at: {without_secrets(url)}")
    return bucket, key


def _canonical(url: str) -> str:
    """Return a URL with canonical quoting, which botocore leaves to the caller for S3."""
    parts = urlsplit(url)
    path = quote(unquote(parts.path), safe="/-_.~") or "/"
    pairs = sorted(parse_qsl(parts.query, keep_blank_values=True))
    query = urlencode(pairs, quote_via=quote, safe="-_.~")
    return urlunsplit((parts.scheme, parts.netloc, path, query, ""))
