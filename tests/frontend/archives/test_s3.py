"""Where objects lie and how requests for them are signed, with credentials of several kinds."""

import datetime as dt
import sys

import pytest

from marserve.frontend.archives.s3 import Signer, object_url
from marserve.frontend.errors import DownloadFailed, ModelNotFound

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No credentials but those of a test."""
    for name in (*KEYS, "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def keys(monkeypatch):
    """Credentials in the environment."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("keys")
def test_what_is_sent_is_spelt_as_it_was_signed():
    url = "https://b.s3.amazonaws.com/a b/%7Eü+%2b.mar?b=%20&a"
    signed_url, _ = Signer().sign(url)
    assert signed_url == "https://b.s3.amazonaws.com/a%20b/~%C3%BC%2B%2B.mar?a=&b=%20"


@pytest.mark.usefixtures("keys")
def test_lent_credentials_come_with_a_token_that_is_signed_too(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "borrowed")
    headers = {name.lower(): text for name, text in Signer().sign("s3://b/k")[1].items()}
    assert headers["x-amz-security-token"] == "borrowed"
    assert "x-amz-date;x-amz-security-token," in headers["authorization"]


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
def test_where_an_object_lies(url, region, environ, expected):
    assert object_url(url, region, environ) == expected


@pytest.mark.parametrize(
    "url", ["s3://", "s3://b", "s3://b/", "s3:///k", "s3://u@b/k", "s3://b:1/k"]
)
def test_a_url_that_names_no_object(url):
    with pytest.raises(ModelNotFound, match="Model not found at"):
        object_url(url, "r", {})


@pytest.mark.usefixtures("keys")
@pytest.mark.parametrize(
    ("environ", "region"),
    [
        ({}, "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "eu-north-1"}, "eu-north-1"),
    ],
)
def test_credentials_of_the_environment(environ, region, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    signed_url, headers = Signer().sign("s3://b/k")
    assert signed_url == f"https://b.s3.{region}.amazonaws.com/k"
    assert f"Credential=key/{dt.datetime.now(dt.UTC):%Y%m%d}/{region}/s3" in str(headers)


def test_credentials_of_a_profile(tmp_path):
    (tmp_path / "credentials").write_text(
        "[default]\naws_access_key_id = p\naws_secret_access_key = s\n"
    )
    (tmp_path / "config").write_text("[default]\nregion = ap-south-1\n")
    signed_url, headers = Signer().sign("s3://b/k")
    assert signed_url == "https://b.s3.ap-south-1.amazonaws.com/k"
    assert "Credential=p/" in str(headers)
    assert "security-token" not in str(headers).lower()


def test_without_the_library_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.auth", None)
    with pytest.raises(DownloadFailed) as failure:
        Signer().sign("s3://b/k")
    assert failure.value.message == (
        "Failed to download archive from: s3://b/k: no AWS credentials; install botocore (pip "
        "install botocore), which reads and uses them, and set AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_DEFAULT_REGION, or a profile or role."
    )


def test_a_library_that_finds_nothing():
    with pytest.raises(DownloadFailed, match="or a profile or role that botocore finds"):
        Signer().sign("s3://b/k")


def test_half_of_the_credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    with pytest.raises(DownloadFailed, match="botocore says: Partial credentials found in env"):
        Signer().sign("s3://b/k")
