"""Archives in S3: a URL to a request that says who asks.

A signed request is an ordinary GET with some headers more, so it is fetched like every other
download, within the same limits. The signature (AWS Signature Version 4) is half a page of HMACs,
written here because botocore is 30 MB of descriptions of other services. What botocore does know
better is where credentials may lie: profiles, roles of machines and containers. It is asked where
it is installed (``pip install marserve[s3]``) and the environment has none.

Regions are not guessed: ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, else botocore's, else us-east-1.
``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` leads ``s3://`` to another server that speaks the
protocol.
"""

import datetime as dt
import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlsplit, urlunsplit

from marserve.frontend.errors import DownloadFailed, ModelNotFound

_ALGORITHM = "AWS4-HMAC-SHA256"
_NO_BODY = hashlib.sha256(b"").hexdigest()
_DEFAULT_REGION = "us-east-1"
_BUCKET = re.compile(r"[\w.-]+", re.ASCII)


@dataclass(frozen=True)
class Credentials:
    """Who asks, and in which region.

    Attributes:
        access_key: Public name of the key.
        secret_key: What requests are signed with.
        region: Where the bucket lies.
        token: Of credentials that are lent for some hours; empty with lasting ones.
    """

    access_key: str
    secret_key: str
    region: str
    token: str = ""


@dataclass(frozen=True)
class SignedRequest:
    """A GET that says who asks.

    Attributes:
        url: Where to send it, spelt as it was signed.
        headers: To be sent along, and to nobody else: not to where a redirect leads.
    """

    url: str
    headers: Mapping[str, str]


def signed_request(url: str) -> SignedRequest:
    """A request for an archive, signed with the credentials of this machine.

    Args:
        url: ``s3://bucket/key``, or the http(s) URL of an object.

    Raises:
        DownloadFailed: There are no credentials.
        ModelNotFound: The URL names no object.
    """
    credentials = _find_credentials(url)
    if urlsplit(url).scheme == "s3":
        url = object_url(url, credentials.region)
    return sign(url, credentials, dt.datetime.now(dt.UTC))


def object_url(url: str, region: str, environ: Mapping[str, str] = os.environ) -> str:
    """The https URL of ``s3://bucket/key``.

    Raises:
        ModelNotFound: There is no bucket or no key in it.
    """
    parts = urlsplit(url)
    bucket, key = parts.netloc, parts.path.removeprefix("/")
    if not key or not _BUCKET.fullmatch(bucket):
        raise ModelNotFound(f"Model not found at: {url}")
    endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
    if endpoint:
        place = f"{endpoint.rstrip('/')}/{bucket}"
    else:
        host = f"s3.{region}.amazonaws.com" + (".cn" if region.startswith("cn-") else "")
        # No certificate covers a name with more dots than it has itself.
        place = f"https://{host}/{bucket}" if "." in bucket else f"https://{bucket}.{host}"
    return f"{place}/{key}" + (f"?{parts.query}" if parts.query else "")


def sign(
    url: str,
    credentials: Credentials,
    now: dt.datetime,
    headers: Mapping[str, str] | None = None,
) -> SignedRequest:
    """Signs a GET.

    Args:
        url: Of the object.
        credentials: Of who asks.
        now: In UTC; the signature is good for some minutes.
        headers: To be sent and signed besides our own, named in lower case.
    """
    parts = urlsplit(url)
    path = quote(unquote(parts.path), safe="/-_.~") or "/"
    query = _canonical_query(parts.query)
    signed = {
        **(headers or {}),
        "host": parts.netloc,
        "x-amz-content-sha256": _NO_BODY,
        "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
    }
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    names = ";".join(sorted(signed))
    lines = [f"{name}:{signed[name]}\n" for name in sorted(signed)]
    canonical = "\n".join(["GET", path, query, "".join(lines), names, _NO_BODY])
    scope = f"{now:%Y%m%d}/{credentials.region}/s3/aws4_request"
    signature = _signature(canonical, scope, signed["x-amz-date"], credentials)
    signed["authorization"] = (
        f"{_ALGORITHM} Credential={credentials.access_key}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return SignedRequest(urlunsplit((parts.scheme, parts.netloc, path, query, "")), signed)


def _canonical_query(query: str) -> str:
    pairs = parse_qsl(query, keep_blank_values=True)
    encoded = [(quote(name, safe="-_.~"), quote(value, safe="-_.~")) for name, value in pairs]
    return "&".join(f"{name}={value}" for name, value in sorted(encoded))


def _signature(canonical: str, scope: str, moment: str, credentials: Credentials) -> str:
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = f"{_ALGORITHM}\n{moment}\n{scope}\n{hashed}"
    return hmac.digest(key, text.encode(), "sha256").hex()


def _find_credentials(url: str, environ: Mapping[str, str] = os.environ) -> Credentials:
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION")
    key, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
    if key and secret:
        token = environ.get("AWS_SESSION_TOKEN", "")
        return Credentials(key, secret, region or _DEFAULT_REGION, token)
    return _credentials_of_botocore(url, region)


def _credentials_of_botocore(url: str, region: str | None) -> Credentials:
    """Those of a profile or a role.

    Raises:
        DownloadFailed: There are none, or nobody to ask for them.
    """
    failed = f"Failed to download archive from: {url}: no AWS credentials;"
    wanted = "set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_DEFAULT_REGION"
    try:
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session
    except ImportError as error:
        raise DownloadFailed(
            f"{failed} {wanted}, or install botocore (pip install marserve[s3]), "
            "which reads profiles and roles."
        ) from error
    try:
        session = Session()
        found = session.get_credentials()
        frozen = found.get_frozen_credentials() if found is not None else None
        region = region or session.get_config_variable("region") or _DEFAULT_REGION
    except BotoCoreError as error:
        raise DownloadFailed(f"{failed} botocore says: {error}") from error
    if frozen is None or not frozen.access_key or not frozen.secret_key:
        raise DownloadFailed(f"{failed} {wanted}, or a profile or role that botocore finds.")
    return Credentials(frozen.access_key, frozen.secret_key, region, frozen.token or "")
