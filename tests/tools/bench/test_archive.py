"""The archive of a model with another precision in it."""

import json
import shutil
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from marserve.tools.bench.archive import ArchiveVariants
from marserve.tools.bench.errors import BenchError

MANIFEST = {"model": {"modelName": "m", "handler": "h.py", "modelVersion": "1.0"}}


def write(path: Path, config: str | None) -> Path:
    manifest: dict[str, Any] = json.loads(json.dumps(MANIFEST))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("h.py", "def handle(data, context): ...")
        archive.writestr("package/weights", "w" * 100)
        if config is not None:
            manifest["model"]["configFile"] = "my.yaml"
            archive.writestr("my.yaml", config)
        archive.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
    return path


@pytest.fixture
def archive(tmp_path):
    config = "batchSize: 4\noptimization: {channels_last: true, precision: fp32}\n"
    return write(tmp_path / "m.mar", config)


@pytest.fixture
def variants(archive):
    with closing(ArchiveVariants(str(archive))) as made:
        yield made


def test_without_a_precision_it_is_what_it_was(variants, archive):
    assert variants.url_for(None) == str(archive)


@pytest.mark.parametrize("config", ["[", "- 1", "a: !!bool x", f"a: {'9' * 5000}", "[" * 10_000])
def test_a_configuration_that_is_no_yaml(tmp_path, config):
    archive = write(tmp_path / "m.mar", config)
    with (
        closing(ArchiveVariants(str(archive))) as made,
        pytest.raises(BenchError, match=r"my\.yaml is not a YAML mapping"),
    ):
        made.url_for("bf16")


def test_nothing_but_the_precision_changes(variants):
    directory = Path(variants.url_for("bf16"))
    assert yaml.safe_load((directory / "my.yaml").read_text()) == {
        "batchSize": 4,
        "optimization": {"channels_last": True, "precision": "bf16"},
    }
    assert (directory / "package" / "weights").read_text() == "w" * 100
    assert json.loads((directory / "MAR-INF" / "MANIFEST.json").read_text())["model"] == {
        **MANIFEST["model"],
        "configFile": "my.yaml",
    }


def test_each_precision_has_its_own(variants):
    urls = {item: variants.url_for(item) for item in ("fp32", "bf16", "fp16")}
    assert len(set(urls.values())) == 3
    assert variants.url_for("bf16") == urls["bf16"]
    for precision, url in urls.items():
        config = yaml.safe_load((Path(url) / "my.yaml").read_text())
        assert config["optimization"]["precision"] == precision


def test_an_archive_without_configuration_gets_one(tmp_path):
    with closing(ArchiveVariants(write(tmp_path / "m.mar", None).as_uri())) as variants:
        directory = Path(variants.url_for("bf16"))
        manifest = json.loads((directory / "MAR-INF" / "MANIFEST.json").read_text())
        config = yaml.safe_load((directory / manifest["model"]["configFile"]).read_text())
        assert config == {"optimization": {"precision": "bf16"}}


def test_a_directory_stays_as_it_was(archive, tmp_path):
    plain = tmp_path / "plain"
    shutil.unpack_archive(archive, plain, "zip")
    before = {path: path.read_bytes() for path in plain.rglob("*") if path.is_file()}
    with closing(ArchiveVariants(str(plain))) as variants:
        directory = Path(variants.url_for("bf16"))
        assert "bf16" in (directory / "my.yaml").read_text()
    assert {path: path.read_bytes() for path in plain.rglob("*") if path.is_file()} == before
    assert not directory.exists()


@pytest.mark.parametrize("url", ["m.mar", "https://example/m.mar", "file:///nowhere/m.mar"])
def test_an_archive_that_is_not_here_is_told(url):
    with (
        closing(ArchiveVariants(url)) as variants,
        pytest.raises(BenchError, match="on this machine"),
    ):
        variants.url_for("bf16")


def test_an_archive_that_is_none_is_told(tmp_path):
    (tmp_path / "m.mar").write_text("nonsense")
    with (
        closing(ArchiveVariants(str(tmp_path / "m.mar"))) as variants,
        pytest.raises(BenchError, match="cannot be read"),
    ):
        variants.url_for("bf16")


@pytest.mark.parametrize("config", ["[", "- a\n- b\n"])
def test_a_configuration_that_is_none_is_told(tmp_path, config):
    url = str(write(tmp_path / "m.mar", config))
    with (
        closing(ArchiveVariants(url)) as variants,
        pytest.raises(BenchError, match=r"my\.yaml"),
    ):
        variants.url_for("bf16")
