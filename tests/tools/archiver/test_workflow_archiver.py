"""torch-workflow-archiver: real archives, opened again by the server's own reader."""

import argparse
import asyncio
import json
import subprocess
import sys
import zipfile
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from workflow_archiver.workflow_packaging import package_workflow
from workflow_archiver.workflow_packaging_utils import WorkflowExportUtils

from marserve.frontend.archives.archive import ArchiveOpener, make_helpers
from marserve.frontend.configuration.config import Config
from marserve.tools.archiver.workflow_archiver import (
    WorkflowArchiverConfig,
    WorkflowArchiverError,
    __version__,
    generate_workflow_archive,
    main,
)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An author's directory, the current one, with a specification and a handler."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "spec.yaml").write_text("models: {}\ndag: {pre: []}\n")
    (tmp_path / "in" / "h.py").write_text("def pre(data, context): ...\n")
    return tmp_path


ARGUMENTS = ["--workflow-name", "wf", "--spec-file", "in/spec.yaml", "--handler", "in/h.py"]


def members() -> dict[str, str]:
    with zipfile.ZipFile("wf.war") as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_an_archive_has_the_manifest_and_the_files_in_its_root(capsys):
    assert main(ARGUMENTS) == 0
    told = f"Successfully exported workflow wf to {Path.cwd()}/wf.war\n"
    assert capsys.readouterr().out == told
    assert sorted(members()) == ["WAR-INF/MANIFEST.json", "h.py", "spec.yaml"]
    manifest = json.loads(members()["WAR-INF/MANIFEST.json"])
    created = datetime.strptime(manifest.pop("createdOn"), "%d/%m/%Y %H:%M:%S").astimezone()
    assert abs(datetime.now().astimezone() - created) < timedelta(minutes=1)
    assert manifest == {
        "workflow": {"workflowName": "wf", "specFile": "spec.yaml", "handler": "h.py"},
        "archiverVersion": __version__,
    }
    with zipfile.ZipFile("wf.war") as archive:
        assert {each.compress_type for each in archive.infolist()} == {zipfile.ZIP_DEFLATED}


def test_the_server_reads_what_was_packed(here):
    main(ARGUMENTS)
    config = Config(model_store=here)
    opener = ArchiveOpener(config, here / "work", make_helpers(config))
    archive, contents = asyncio.run(opener.open_workflow("wf.war"))
    assert (archive.directory / "h.py").is_file()
    contents.manifest.validate()
    assert contents.manifest.workflow_name == "wf"
    assert contents.specification == {"models": {}, "dag": {"pre": []}}
    assert contents.has_handler


def test_the_handler_may_be_left_out():
    assert main(ARGUMENTS[:4]) == 0
    assert sorted(members()) == ["WAR-INF/MANIFEST.json", "spec.yaml"]
    assert "handler" not in json.loads(members()["WAR-INF/MANIFEST.json"])["workflow"]


def test_extra_files_are_files_directories_and_wildcards(here):
    (here / "more" / "deep").mkdir(parents=True)
    (here / "more" / "deep" / "a.txt").write_text("a")
    (here / "b.json").write_text("{}")
    assert main([*ARGUMENTS, "--extra-files", "more,*.json"]) == 0
    assert {"deep/a.txt", "b.json"} < members().keys()


def test_an_archive_that_exists_stays_unless_forced(capsys):
    main(ARGUMENTS)
    before = Path("wf.war").read_bytes()
    assert main(ARGUMENTS) == 1
    assert "wf.war already exists. Use --force/-f" in capsys.readouterr().err
    assert Path("wf.war").read_bytes() == before
    assert main([*ARGUMENTS, "--force"]) == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (["--workflow-name", "a b"], "Workflow name contains special characters."),
        (["--workflow-name", "../x"], "Workflow name contains special characters."),
        (["--workflow-name", "w" * 256], "Workflow name must not be longer than 255 bytes."),
        (["--export-path", "nowhere"], "Given export-path nowhere is not a directory."),
        (["--spec-file", "gone.yaml"], "File does not exist: gone.yaml"),
        (["--handler", "gone.py"], "File does not exist: gone.py"),
        (["--extra-files", "gone.txt"], "File does not exist: gone.txt"),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(change, sentence, capsys, here):
    before = sorted(here.iterdir())
    assert main([*ARGUMENTS, *change]) == 1
    assert capsys.readouterr().err.startswith(sentence)
    assert sorted(here.iterdir()) == before


def test_programs_pack_with_torchserves_two_calls():
    args = argparse.Namespace(
        workflow_name="wf",
        spec_file="in/spec.yaml",
        handler="in/h.py",
        extra_files=None,
        export_path=".",
        force=False,
    )
    package_workflow(args, manifest=WorkflowExportUtils.generate_manifest_json(args))
    assert sorted(members()) == ["WAR-INF/MANIFEST.json", "h.py", "spec.yaml"]
    with pytest.raises(WorkflowArchiverError, match="already exists"):
        generate_workflow_archive(WorkflowArchiverConfig("wf", "in/spec.yaml"))


def test_the_command_is_installed():
    command = Path(sys.executable).with_name("torch-workflow-archiver")
    subprocess.run([command, *ARGUMENTS], check=True, timeout=30)
    assert "spec.yaml" in members()
