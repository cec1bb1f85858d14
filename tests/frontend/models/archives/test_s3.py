"""Signatures against the values that Amazon publishes, and a store that checks them."""

import datetime as dt
import sys
import types
from collections.abc import Iterator

import pytest

from marserve.frontend.errors import DownloadFailed, ModelNotFound
from marserve.frontend.models.archives.s3 import Credentials, object_url, sign, signed_request

# From "Signature Calculations for the Authorization Header" in Amazon's documentation of S3.
EXAMPLE = Credentials(
    "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "us-east-1"
)
MOMENT = dt.datetime(2013, 5, 24, tzinfo=dt.UTC)
BUCKET = "https://examplebucket.s3.amazonaws.com"


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No credentials but those of a test, and no botocore."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "REGION", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setitem(sys.modules, "botocore", None)


@pytest.mark.parametrize(
    ("path", "headers", "signature"),
    [
        (
            "/test.txt",
            {"range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        ("/?lifecycle", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            "/?max-keys=2&prefix=J",
            {},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
        (
            "/?prefix=J&max-keys=2",
            {},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_the_published_signatures(path: str, headers: dict[str, str], signature: str) -> None:
    signed = sign(BUCKET + path, EXAMPLE, MOMENT, headers)
    assert signed.headers["authorization"].endswith(f"Signature={signature}")
    assert (
        "AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request"
        in (signed.headers["authorization"])
    )


def test_what_is_sent_is_spelt_as_it_was_signed() -> None:
    url = f"{BUCKET}/a b/%7Eü+%2b.mar?b=%20&a"
    assert sign(url, EXAMPLE, MOMENT).url == f"{BUCKET}/a%20b/~%C3%BC%2B%2B.mar?a=&b=%20"


def test_lent_credentials_come_with_a_token_that_is_signed_too() -> None:
    lent = Credentials("k", "s", "eu-west-1", "borrowed")
    signed = sign(BUCKET + "/m.mar", lent, MOMENT)
    assert signed.headers["x-amz-security-token"] == "borrowed"
    assert "x-amz-date;x-amz-security-token," in signed.headers["authorization"]


@pytest.mark.parametrize(
    ("url", "region", "environ", "expected"),
    [
        ("s3://b/k.mar", "eu-west-1", {}, "https://b.s3.eu-west-1.amazonaws.com/k.mar"),
        ("s3://b.c/d/k.mar", "us-east-1", {}, "https://s3.us-east-1.amazonaws.com/b.c/d/k.mar"),
        ("s3://b/k", "cn-north-1", {}, "https://b.s3.cn-north-1.amazonaws.com.cn/k"),
        ("s3://b/k?versionId=7", "r", {}, "https://b.s3.r.amazonaws.com/k?versionId=7"),
        ("S3://b/k", "r", {"AWS_ENDPOINT_URL": "http://h:9000/"}, "http://h:9000/b/k"),
        (
            "s3://b/k",
            "r",
            {"AWS_ENDPOINT_URL": "http://no", "AWS_ENDPOINT_URL_S3": "http://yes"},
            "http://yes/b/k",
        ),
    ],
)
def test_where_an_object_lies(
    url: str, region: str, environ: dict[str, str], expected: str
) -> None:
    assert object_url(url, region, environ) == expected


@pytest.mark.parametrize(
    "url", ["s3://", "s3://b", "s3://b/", "s3:///k", "s3://u@b/k", "s3://b:1/k"]
)
def test_a_url_that_names_no_object(url: str) -> None:
    with pytest.raises(ModelNotFound, match="Model not found at"):
        object_url(url, "r", {})


@pytest.mark.parametrize(
    ("environ", "region"),
    [
        ({}, "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "eu-north-1"}, "eu-north-1"),
    ],
)
def test_credentials_of_the_environment(
    environ: dict[str, str], region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "t"}
    for name, value in {**own, **environ}.items():
        monkeypatch.setenv(name, value)
    signed = signed_request("s3://b/k")
    assert signed.url == f"https://b.s3.{region}.amazonaws.com/k"
    assert (
        f"Credential=key/{dt.datetime.now(dt.UTC):%Y%m%d}/{region}/s3"
        in (signed.headers["authorization"])
    )
    assert signed.headers["x-amz-security-token"] == "t"


def test_without_credentials_and_library_both_are_named() -> None:
    with pytest.raises(DownloadFailed) as failure:
        signed_request("s3://b/k")
    assert failure.value.message == (
        "Failed to download archive from: s3://b/k: no AWS credentials; set AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_DEFAULT_REGION, or install botocore (pip install "
        "marserve[s3]), which reads profiles and roles."
    )


@pytest.fixture
def profiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """As much of botocore as is used, with the credentials that a test puts there."""
    found = types.SimpleNamespace(credentials=None, region=None)

    class Session:
        def get_credentials(self) -> object:
            if found.credentials is None:
                return None
            return types.SimpleNamespace(get_frozen_credentials=lambda: found.credentials)

        def get_config_variable(self, name: str) -> object:
            assert name == "region"
            return found.region

    for name, content in (
        ("botocore", {}),
        ("botocore.session", {"Session": Session}),
        ("botocore.exceptions", {"BotoCoreError": ValueError}),
    ):
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    return found


def test_credentials_of_a_profile(profiles: types.SimpleNamespace) -> None:
    profiles.credentials = types.SimpleNamespace(access_key="p", secret_key="s", token=None)
    profiles.region = "ap-south-1"
    signed = signed_request("s3://b/k")
    assert signed.url == "https://b.s3.ap-south-1.amazonaws.com/k"
    assert "Credential=p/" in signed.headers["authorization"]
    assert "x-amz-security-token" not in signed.headers


def test_a_library_that_finds_nothing(profiles: types.SimpleNamespace) -> None:
    with pytest.raises(DownloadFailed, match="or a profile or role that botocore finds"):
        signed_request("s3://b/k")
