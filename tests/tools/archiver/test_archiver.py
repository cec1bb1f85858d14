"""torch-model-archiver: real archives, most of them opened again by the server's own reader."""

import argparse
import asyncio
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from marserve.backend.manifest import Manifest
from marserve.frontend.archives.archive import ArchiveOpener, make_helpers
from marserve.frontend.configuration.config import Config
from marserve.tools.archiver.archiver import (
    BUILT_IN_HANDLERS,
    ModelArchiver,
    ModelArchiverError,
    build_parser,
    generate_model_archive,
    main,
)
from marserve.tools.archiver.config import ModelArchiverConfig

MANIFEST = "MAR-INF/MANIFEST.json"
FORMATS = {"default": "m.mar", "zip-store": "m.mar", "tgz": "m.tar.gz", "no-archive": "m"}
CONFIG = ModelArchiverConfig("m", "image_classifier", "1.0", export_path=".")


def write(path: str, text: str = "") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text or f"contents of {path}")
    return file


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """An author's directory, the current one."""
    directory = tmp_path / "author"
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


def opened(archive: Path, workdir: Path) -> dict[str, str]:
    """What the server finds in an archive."""
    config = Config(model_store=archive.absolute().parent)
    opener = ArchiveOpener(config, workdir, make_helpers(config))
    model = asyncio.run(opener.open(archive.name))
    return {
        path.relative_to(model.directory).as_posix(): path.read_text()
        for path in model.directory.rglob("*")
        if path.is_file()
    }


def packed(here: Path, **options: object) -> dict[str, str]:
    """What the server finds in an archive made with these options, the manifest apart."""
    archive = generate_model_archive(replace(CONFIG, export_path="out", **options))
    files = opened(archive, here.parent / "work")
    assert files.pop(MANIFEST)
    return files


def run(*options: str) -> int:
    return main(
        ["--model-name", "m", "--version", "1.0", "--handler", "image_classifier", *options]
    )


# The command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("archive_format", "file_name"), FORMATS.items())
def test_everything_that_goes_in_comes_out_at_the_server(here, capsys, archive_format, file_name):
    names = ["weights.pt", "model.py", "my_handler.py", "labels.json", "needs.txt", "model.yaml"]
    for name in names:
        write(f"src/{name}")
    options = {
        "--model-name": "m",
        "--version": "2.1",
        "--serialized-file": "src/weights.pt",
        "--model-file": "src/model.py",
        "--handler": "src/my_handler.py",
        "--extra-files": "src/labels.json",
        "--runtime": "python3",
        "--export-path": "store",
        "--archive-format": archive_format,
        "--requirements-file": "src/needs.txt",
        "--config-file": "src/model.yaml",
    }
    assert main([word for option in options.items() for word in option]) == 0
    expected = Path("store", file_name)
    assert capsys.readouterr().out == f"Successfully exported model m to {expected}\n"
    assert [path.name for path in Path("store").iterdir()] == [file_name]
    files = opened(expected, here.parent / "work")
    manifest = Manifest.parse(files.pop(MANIFEST))
    assert files == {name: f"contents of src/{name}" for name in names}
    assert manifest == Manifest(
        model_name="m",
        model_version="2.1",
        handler="my_handler.py",
        runtime="python3",
        serialized_file="weights.pt",
        model_file="model.py",
        config_file="model.yaml",
        requirements_file="needs.txt",
        archiver_version=importlib.metadata.version("marserve"),
        created_on=manifest.created_on,
    )
    made = datetime.strptime(manifest.created_on, "%d/%m/%Y %H:%M:%S").astimezone()
    assert abs(datetime.now().astimezone() - made) < timedelta(minutes=5)


def test_the_manifest_is_torchserves_byte_for_byte():
    """As torch-model-archiver 0.12.0 wrote it for these words, but for date and its own version."""
    for name in ("weights.pt", "model.py", "h.py", "needs.txt", "model.yaml"):
        write(f"src/{name}")
    words = "--serialized-file src/weights.pt --model-file src/model.py --handler src/h:go -v 1.0 "
    words += "--model-name m --runtime python3 -r src/needs.txt -c src/model.yaml"
    assert main(words.split()) == 0
    with zipfile.ZipFile("m.mar") as archive:
        written = archive.read(MANIFEST).decode()
    masked = re.sub(r'(createdOn|archiverVersion)": "[^"]+"', r'\1": "?"', written)
    assert (
        masked
        == """{
  "createdOn": "?",
  "runtime": "python3",
  "model": {
    "modelName": "m",
    "serializedFile": "weights.pt",
    "handler": "h:go",
    "modelFile": "model.py",
    "modelVersion": "1.0",
    "requirementsFile": "needs.txt",
    "configFile": "model.yaml"
  },
  "archiverVersion": "?"
}"""
    )


def test_short_options_mean_the_long_ones():
    words = ["--model-name=m", "--handler=h", "-v7", "-r", "needs.txt", "-c", "model.yaml", "-f"]
    config = ModelArchiverConfig.from_args(build_parser().parse_args(words))
    assert config == ModelArchiverConfig(
        "m", "h", "7", requirements_file="needs.txt", config_file="model.yaml", force=True
    )


def test_what_is_not_given_is_the_default(here):
    words = ["--model-name", "m", "--handler", "h", "--version", "1"]
    args = build_parser().parse_args(words)
    assert vars(args) == {
        "model_name": "m",
        "handler": "h",
        "version": "1",
        "serialized_file": None,
        "model_file": None,
        "extra_files": None,
        "runtime": "python",
        "export_path": str(here),
        "archive_format": "default",
        "force": False,
        "requirements_file": None,
        "config_file": None,
        "keep_tree": False,
        "precision": None,
    }
    assert ModelArchiverConfig.from_args(args) == ModelArchiverConfig("m", "h", "1")


@pytest.mark.parametrize(
    "words",
    [
        ["--version", "1", "--handler", "h"],
        ["--model-name", "m", "--handler", "h"],
        ["--model-name", "m", "--version", "1"],
        ["--model-name", "m", "--version", "1", "--handler", "h", "--runtime", "java"],
        ["--model-name", "m", "--version", "1", "--handler", "h", "--archive-format", "rar"],
    ],
)
def test_a_wrong_command_line_ends_with_status_2(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert "torch-model-archiver: error" in capsys.readouterr().err


def test_the_parser_serves_other_commands_under_their_name():
    assert build_parser("marserve pack").format_usage().startswith("usage: marserve pack ")


@pytest.mark.parametrize("option", ["--model-name", "--version"])
def test_a_name_or_version_too_long_for_a_request_is_an_error(option, capsys):
    words = {"--model-name": "m", "--version": "1", "--handler": "base_handler", option: "n" * 256}
    assert main([word for pair in words.items() for word in pair]) == 1
    assert "must not be longer than 255 bytes." in capsys.readouterr().err
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("version", ["1/2", "..", "1\n2"])
def test_a_version_nobody_could_address_is_an_error(version, capsys):
    assert main(["--model-name=m", f"--version={version}", "--handler", "base_handler"]) == 1
    assert capsys.readouterr().err.startswith("Model version must ")


@pytest.mark.parametrize("name", ["-m", "_m", "a b", "a/b", "..", "é", "", "m\n"])
def test_a_name_with_special_characters_is_an_error(name, capsys):
    assert main([f"--model-name={name}", "--version", "1", "--handler", "base_handler"]) == 1
    assert capsys.readouterr().err.startswith("Model name contains special characters.")
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    "option",
    ["--serialized-file", "--model-file", "--extra-files", "--requirements-file", "--config-file"],
)
def test_a_file_that_is_not_there_is_an_error(option, capsys):
    assert run(option, "nowhere.bin", "--export-path", "out") == 1
    assert capsys.readouterr().err == "File does not exist: nowhere.bin\n"
    assert list(Path().iterdir()) == []


def test_warnings_reach_the_terminal_of_a_plain_run():
    command = [sys.executable, "-m", "marserve.tools.archiver.archiver", "--model-name", "m"]
    command += ["--version", "1", "--handler", "base_handler", "--extra-files", "*.none"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "No file matches the wildcard *.none.\n"
    assert done.stdout.startswith("Successfully exported model m to ")


# The place and what is there --------------------------------------------------------------------


def test_the_export_path_is_created_with_a_warning(caplog):
    assert run("--export-path", "deep/er") == 0
    assert Path("deep/er/m.mar").is_file()
    assert "Creating the export-path deep/er" in caplog.text


def test_an_export_path_that_is_a_file_is_an_error(capsys):
    write("out")
    assert run("--export-path", "out") == 1
    assert capsys.readouterr().err.startswith("Given export-path out is not a directory. ")


@pytest.mark.parametrize(("archive_format", "file_name"), FORMATS.items())
def test_an_archive_that_exists_is_replaced_only_by_force(
    capsys, caplog, archive_format, file_name
):
    assert run("--archive-format", archive_format, "--version", "old") == 0
    again = ["--archive-format", archive_format, "--version", "new"]
    assert run(*again) == 1
    target = Path.cwd() / file_name
    assert capsys.readouterr().err == f"{target} already exists. Use --force/-f to overwrite it.\n"
    assert run(*again, "--force") == 0
    assert f"Overwriting {target} ..." in caplog.text
    manifest = Manifest.parse(opened(target, Path("work"))[MANIFEST])
    assert manifest.model_version == "new"


def test_forcing_a_directory_leaves_its_other_files(here):
    write("m/sub/old.txt")
    write("extra/sub/new.txt")
    assert run("--archive-format", "no-archive", "--extra-files", "extra", "--force") == 0
    assert {path.name for path in Path("m/sub").iterdir()} == {"old.txt", "new.txt"}


@pytest.mark.parametrize("archive_format", FORMATS)
def test_a_run_that_fails_leaves_nothing_half_done(archive_format):
    """A directory, not empty, in the place of the file and a file in the place of the directory."""
    if archive_format == "no-archive":
        write("out/m")
    else:
        write(f"out/{FORMATS[archive_format]}/in_the_way")
    before = set(Path().rglob("*"))
    with pytest.raises(ModelArchiverError, match="Failed to save the model-archive to model-path"):
        generate_model_archive(
            replace(CONFIG, export_path="out", archive_format=archive_format, force=True)
        )
    assert set(Path().rglob("*")) == before


# Members ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("archive_format", "method"),
    [("default", zipfile.ZIP_DEFLATED), ("zip-store", zipfile.ZIP_STORED)],
)
def test_a_mar_is_compressed_or_stored_with_its_members_in_order(archive_format, method):
    for name in ("b.txt", "a.txt", "c/d.txt"):
        write(f"extra/{name}")
    archive = generate_model_archive(
        replace(CONFIG, extra_files="extra", archive_format=archive_format)
    )
    with zipfile.ZipFile(archive) as file:
        assert file.namelist() == [MANIFEST, "a.txt", "b.txt", "c/d.txt"]
        assert {info.compress_type for info in file.infolist()} == {method}


def test_a_tar_holds_plain_ownerless_files_below_the_models_name():
    first = write("extra/a.txt")
    (first.parent / "same.txt").hardlink_to(first)
    (first.parent / "link.txt").symlink_to(first.absolute())
    archive = generate_model_archive(replace(CONFIG, extra_files="extra", archive_format="tgz"))
    with tarfile.open(archive, "r:gz") as file:
        members = file.getmembers()
    assert [member.name for member in members] == [
        f"m/{name}" for name in (MANIFEST, "a.txt", "link.txt", "same.txt")
    ]
    assert all(member.isreg() and member.uid == 0 and not member.uname for member in members)


def test_a_file_older_than_zip_can_say_is_packed(here):
    os.utime(write("old.txt"), (0, 0))
    assert packed(here, extra_files="old.txt") == {"old.txt": "contents of old.txt"}


@pytest.mark.parametrize("name", BUILT_IN_HANDLERS)
def test_a_built_in_handler_is_named_and_not_copied(here, name):
    assert packed(here, handler=name) == {}
    assert manifest_of(handler=name).handler == name


@pytest.mark.parametrize("name", ["BaseHandler", "TorchScriptHandler"])
def test_the_other_runtime_has_its_own_built_in_handlers(name):
    assert manifest_of(handler=name, runtime="LSP").handler == name


def manifest_of(**options: object) -> Manifest:
    archive = generate_model_archive(replace(CONFIG, force=True, **options))
    with zipfile.ZipFile(archive) as file:
        return Manifest.parse(file.read(MANIFEST).decode())


@pytest.mark.parametrize(
    ("typed", "in_manifest"),
    [
        ("h.py", "h.py"),
        ("h", "h"),
        ("h:fn", "h:fn"),
        ("dir/h.py", "h.py"),
        ("dir/h", "h"),
        ("dir/h:fn", "h:fn"),
        ("dir/h.py:fn", "h.py:fn"),
        ("./dir.py/h:fn", "h:fn"),
    ],
)
def test_every_form_of_the_handler_argument(here, typed, in_manifest):
    write(str(Path(typed).with_name("h.py")), "the handler")
    assert packed(here, handler=typed) == {"h.py": "the handler"}
    assert manifest_of(handler=typed).handler == in_manifest


@pytest.mark.parametrize("typed", ["build/libserve:Fn", "build/libserve.so:Fn", "build/libserve"])
def test_a_handler_of_the_other_runtime_is_a_library(here, typed):
    write("build/libserve.so", "ELF")
    assert packed(here, handler=typed, runtime="LSP") == {"libserve.so": "ELF"}
    assert manifest_of(handler=typed, runtime="LSP").handler == typed.removeprefix("build/")


def test_a_missing_handler_file_is_an_error():
    with pytest.raises(FileNotFoundError, match=r"^File does not exist: dir/h\.py$"):
        generate_model_archive(replace(CONFIG, handler="dir/h:fn"))


# Extra files ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra_files", "names"),
    [
        ("a.txt", {"a.txt"}),
        (" a.txt , sub/b.txt ,", {"a.txt", "b.txt"}),
        ("*.txt", {"a.txt", "c.txt"}),
        ("?.txt,sub/[b]*", {"a.txt", "b.txt", "c.txt"}),
        ("sub", {"b.txt", "deep/d.txt"}),
        ("sub/", {"b.txt", "deep/d.txt"}),
        ("s*", {"b.txt", "deep/d.txt"}),
        ("{here}/sub/b.txt,{here}/?.txt", {"a.txt", "b.txt", "c.txt"}),
        ("x[1].txt", {"x[1].txt"}),
        ("", set()),
    ],
)
def test_extra_files_and_wildcards(here, extra_files, names):
    for name in ("a.txt", "c.txt", "sub/b.txt", "sub/deep/d.txt"):
        write(name)
    if "[1]" in extra_files:
        write("x[1].txt")
    assert set(packed(here, extra_files=extra_files.format(here=here))) == names


@pytest.mark.parametrize(
    ("extra_files", "names"),
    [
        ("sub", {"sub/b.txt", "sub/deep/d.txt"}),
        ("sub/deep,sub/b.txt", {"sub/deep/d.txt", "sub/b.txt"}),
        ("sub/*", {"sub/deep/d.txt", "sub/b.txt"}),
        ("{here}/sub/deep", {"sub/deep/d.txt"}),
        ("../other/lib,../other/lib/e.txt", {"lib/e.txt", "e.txt"}),
        ("../author/sub/b.txt", {"sub/b.txt"}),
        (".", {"sub/b.txt", "sub/deep/d.txt"}),
    ],
)
def test_kept_trees(here, extra_files, names):
    for name in ("sub/b.txt", "sub/deep/d.txt", "../other/lib/e.txt"):
        write(name)
    text = extra_files.format(here=here)
    assert set(packed(here, extra_files=text, keep_tree=True)) == names


def test_keep_tree_is_an_option_of_the_command(here):
    write("sub/b.txt")
    assert run("--extra-files", "sub", "--keep-tree") == 0
    assert "sub/b.txt" in opened(Path("m.mar"), here.parent / "work")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["sub"], "sub: its contents are at the root of the archive; --keep-tree keeps"),
        (["sub", "--keep-tree"], ""),
        (["sub/b.txt"], ""),
    ],
)
def test_a_directory_that_is_flattened_is_reported(options, said, caplog):
    write("sub/b.txt")
    assert run("--extra-files", *options) == 0
    assert ("--keep-tree" in caplog.text) == bool(said)
    assert said in caplog.text


def test_caches_and_hidden_directories_stay_out_hidden_files_go_in(here):
    for name in ("__pycache__/a", "__MACOSX/a", ".git/a", "s/.idea/a", "s/__pycache__/a"):
        write(f"extra/{name}")
    for name in (".hidden", "s/.hidden", "b.pyc"):
        write(f"extra/{name}")
    assert set(packed(here, extra_files="extra")) == {".hidden", "s/.hidden", "b.pyc"}


def test_a_wildcard_without_a_match_is_a_warning(here, caplog):
    assert packed(here, extra_files="*.none") == {}
    assert "No file matches the wildcard *.none." in caplog.text


def test_of_two_files_with_one_name_the_later_wins_with_a_warning(here, caplog):
    write("one/a.txt", "first")
    write("two/a.txt", "second")
    assert packed(here, extra_files="one,two") == {"a.txt": "second"}
    assert "two/a.txt replaces one/a.txt: both are called a.txt in the archive." in caplog.text


def test_one_file_named_twice_is_no_collision(here, caplog):
    write("model.yaml")
    packed(here, extra_files="model.yaml,./model.yaml", config_file="model.yaml")
    assert "replaces" not in caplog.text


def test_a_file_and_a_directory_of_one_name_are_an_error():
    write("one/a")
    write("two/a/b.txt")
    with pytest.raises(ModelArchiverError, match="are both called a in the archive"):
        generate_model_archive(replace(CONFIG, extra_files="one,two"))


def test_an_old_manifest_among_the_extra_files_gives_way(here, caplog):
    write(f"unpacked/{MANIFEST}", "old")
    write("unpacked/weights.pt")
    assert set(packed(here, extra_files="unpacked")) == {"weights.pt"}
    assert f"The {MANIFEST} among the extra files is replaced" in caplog.text
    with zipfile.ZipFile("out/m.mar") as archive:
        assert archive.namelist() == [MANIFEST, "weights.pt"]


def test_links_to_directories_are_followed_but_not_in_a_circle(here):
    write("lib/a.txt")
    write("extra/b.txt")
    Path("extra/linked").symlink_to(here / "lib")
    assert set(packed(here, extra_files="extra")) == {"b.txt", "linked/a.txt"}
    Path("lib/round").symlink_to(here / "lib")
    with pytest.raises(ModelArchiverError, match="is a link to a directory that contains it"):
        generate_model_archive(replace(CONFIG, extra_files="extra"))


# The Python API ---------------------------------------------------------------------------------


def test_the_class_and_the_function_do_the_same():
    assert ModelArchiver.generate_model_archive(CONFIG) == Path("m.mar")
    with pytest.raises(ModelArchiverError, match="already exists"):
        generate_model_archive(CONFIG)


def test_a_foreign_namespace_may_lack_our_options_and_have_its_own():
    args = argparse.Namespace(model_name="m", handler="h", version="1", force=True, theirs=1)
    expected = ModelArchiverConfig("m", "h", "1", force=True)
    assert ModelArchiverConfig.from_args(args) == expected


@pytest.mark.parametrize("wrong", [{"runtime": "java"}, {"archive_format": "rar"}])
def test_the_api_checks_what_the_command_line_would(wrong):
    with pytest.raises(ModelArchiverError, match=re.escape(next(iter(wrong.values())))):
        generate_model_archive(replace(CONFIG, **wrong))
