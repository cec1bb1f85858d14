"""The archiver as other projects call it: step by step, with a Namespace."""

import argparse
import json
import sys
import zipfile
from pathlib import Path
from unittest import mock

import pytest
from model_archiver.manifest_components.manifest import Manifest, RuntimeType
from model_archiver.manifest_components.model import Model
from model_archiver.model_archiver_error import ModelArchiverError
from model_archiver.model_packaging import (
    ModelExportUtils,
    generate_model_archive,
    package_model,
)

import model_archiver
from model_archiver import model_packaging_utils as utils


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("handler.py", "weights.pt", "extra.json"):
        (tmp_path / name).write_text(f"contents of {name}")
    return tmp_path


@pytest.fixture
def arguments():
    """What projects write out of TorchServe's first years; newer options are not there."""
    return argparse.Namespace(
        model_file=None,
        serialized_file="weights.pt",
        handler="./handler.py",
        model_name="kitten",
        version="2.0",
        export_path="out",
        force=True,
        extra_files="extra.json",
        requirements_file=None,
        runtime="python",
        archive_format="default",
    )


def read(archive: Path) -> dict[str, str]:
    with zipfile.ZipFile(archive) as file:
        return {name: file.read(name).decode() for name in file.namelist()}


def test_a_manifest_and_then_the_archive(arguments):
    manifest = ModelExportUtils.generate_manifest_json(arguments)
    package_model(arguments, manifest=manifest)

    members = read(Path("out/kitten.mar"))
    assert members.pop("MAR-INF/MANIFEST.json") == manifest
    assert members == {
        name: f"contents of {name}" for name in ("extra.json", "handler.py", "weights.pt")
    }
    document = json.loads(manifest)
    assert document["model"] == {
        "modelName": "kitten",
        "serializedFile": "weights.pt",
        "handler": "handler.py",
        "modelVersion": "2.0",
    }
    assert (document["runtime"], document["archiverVersion"]) == (
        "python",
        model_archiver.__version__,
    )


def test_a_manifest_of_ones_own_goes_in_as_it_is(arguments):
    package_model(arguments, '{"mine": true}')
    assert read(Path("out/kitten.mar"))["MAR-INF/MANIFEST.json"] == '{"mine": true}'


@pytest.mark.parametrize("archive_format", ["default", "zip-store", "tgz", "no-archive"])
def test_a_folder_and_then_the_archive_of_it(archive_format):
    folder = ModelExportUtils.copy_artifacts(
        "kitten", "python", handler="handler.py", serialized_file="weights.pt"
    )
    assert {path.name for path in Path(folder).iterdir()} == {"handler.py", "weights.pt"}
    ModelExportUtils.archive("out", "kitten", folder, "{}", archive_format)
    assert Path(ModelExportUtils.get_archive_export_path("out", "kitten", archive_format)).exists()


def test_the_checks(arguments):
    ModelExportUtils.validate_inputs("kitten", "out")
    assert Path("out").is_dir()
    assert ModelExportUtils.check_mar_already_exists("kitten", None, False) == str(Path.cwd())
    package_model(arguments, "{}")
    with pytest.raises(ModelArchiverError, match="already exists"):
        ModelExportUtils.check_mar_already_exists("kitten", "out", False)
    assert ModelExportUtils.check_mar_already_exists("kitten", "out", True) == "out"
    with pytest.raises(ModelArchiverError, match="special characters"):
        ModelExportUtils.check_model_name_regex_or_exit("kit/ten")
    with pytest.raises(ModelArchiverError, match="not a directory"):
        ModelExportUtils.validate_inputs("kitten", "handler.py")


def test_without_arguments_the_command_line_is_read(monkeypatch):
    line = "archiver --model-name kitten --version 1 --handler handler.py --export-path out"
    monkeypatch.setattr(sys, "argv", line.split())
    generate_model_archive()
    assert "handler.py" in read(Path("out/kitten.mar"))


def test_what_is_missing_is_told():
    with pytest.raises(TypeError, match="handler"):
        package_model(argparse.Namespace(model_name="kitten", version="1"), "{}")


def test_a_manifest_in_parts():
    model = Model("m", "a/w.pt", "b/h.py", "c/m.py", "1.0", {"x": 1}, "d/r.txt", "e/c.yaml")
    assert json.loads(str(model)) == {
        "modelName": "m",
        "serializedFile": "w.pt",
        "handler": "h.py",
        "modelFile": "m.py",
        "modelVersion": "1.0",
        "extensions": {"x": 1},
        "requirementsFile": "r.txt",
        "configFile": "c.yaml",
    }
    manifest = Manifest(RuntimeType.PYTHON3.value, model)
    assert manifest.manifest_dict["runtime"] == "python3"
    assert json.loads(str(manifest)) == manifest.manifest_dict
    with pytest.raises(ValueError, match="cobol"):
        Manifest("cobol", model)


def test_the_small_helpers():
    assert ModelExportUtils.find_unique(["a.onnx", "b.json"], ".onnx") == "a.onnx"
    assert ModelExportUtils.find_unique(["a.onnx", "b.json"], ".pt") is None
    with pytest.raises(ModelArchiverError, match=r"Only one \.pt file"):
        ModelExportUtils.find_unique(["a.pt", "b.pt"], ".pt")

    ModelExportUtils.clean_temp_files(["extra.json", "weights.pt"])
    assert [path.name for path in Path.cwd().iterdir()] == ["handler.py"]

    names = ["model", "__pycache__", ".git"]
    kept = [name for name in names if ModelExportUtils.directory_filter(name, {"__pycache__"})]
    assert kept == ["model"]
    names = ["a.py", "a.pyc", "old.mar", ".DS_Store", "MANIFEST.json", "notes"]
    kept = [name for name in names if ModelExportUtils.file_filter(name, {"notes"})]
    assert kept == ["a.py"]


@pytest.mark.parametrize("archive_format", ["default", "zip-store"])
def test_packing_under_the_patch_of_torchserves_tests(arguments, archive_format):
    arguments.archive_format = archive_format
    with mock.patch(
        "model_archiver.model_packaging_utils.zipfile.ZipFile",
        lambda x, y, _: zipfile.ZipFile(x, y, zipfile.ZIP_STORED),
    ):
        package_model(arguments, "{}")
    assert "handler.py" in read(Path("out/kitten.mar"))


def test_the_module_has_the_names_that_tests_of_other_projects_patch():
    names = "BytesIO MANIFEST_FILE_NAME MAR_INF MODEL_ARCHIVE_VERSION MODEL_SERVER_VERSION Manifest"
    names += " Model ModelArchiverError ModelExportUtils Path archiving_options glob logging os re"
    for name in f"{names} model_handlers shutil tarfile tempfile zipfile".split():
        assert hasattr(utils, name)
    with mock.patch("model_archiver.model_packaging_utils.zipfile") as patched:
        assert utils.zipfile is patched
