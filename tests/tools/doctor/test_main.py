"""From the command line to the exit status: what is printed, written and asked."""

import contextlib
import io
import json
import os
import re
import resource
import stat
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from terminal import Terminal

from marserve.tools.doctor.main import main
from marserve.tools.doctor.options import build_parser
from marserve.tools.doctor.rules import RULES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
MANIFEST = {"runtime": "python", "model": {"modelName": "m", "modelVersion": "1.0"}}
HANDLER = "def handle(data, context):\n    return data\n"


@pytest.fixture
def doctor(capsys):
    """Run it; the exit status and what it prints."""

    def run(*arguments):
        status = main([str(each) for each in arguments])
        return status, "".join(capsys.readouterr())

    return run


@pytest.fixture
def findings(capsys):
    """Run it; the findings but those that something stays as it is."""

    def run(*arguments):
        main([*map(str, arguments), "--json"])
        found = json.loads(capsys.readouterr().out)["findings"]
        return [each for each in found if each["level"] != "works"]

    return run


def rules(found: list[dict[str, Any]]) -> list[str]:
    return [each["rule"] for each in found]


def archive(path: Path, handler: str, **files: str) -> Path:
    """A .mar with a handler and files; dots in their names are written as two underscores."""
    manifest = json.loads(json.dumps(MANIFEST))
    manifest["model"]["handler"] = "handler.py"
    members = {"handler.py": handler, **{n.replace("__", "."): t for n, t in files.items()}}
    if "requirements.txt" in members:
        manifest["model"]["requirementsFile"] = "requirements.txt"
    if "model-config.yaml" in members:
        manifest["model"]["configFile"] = "model-config.yaml"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        for name, text in members.items():
            packed.writestr(name, text)
    return path


# -- what is printed -------------------------------------------------------------------------------


def test_each_finding_says_what_it_is_what_to_do_and_where_to_read(doctor, tmp_path):
    (tmp_path / "config.properties").write_text("inference_address=nowhere\n")
    status, printed = doctor(tmp_path)
    assert status == 1
    assert printed.splitlines()[:4] == [
        "Cannot work (1)",
        "  config.properties:1: inference_address=nowhere prevents the start: the key takes "
        "http://host[:port], https://host[:port] or unix:/path. [config-value]",
        "    -> Correct or remove inference_address.",
        "       docs/compatibility.md#configuration-keys",
    ]


def test_the_same_thing_at_many_places_is_told_once(doctor, tmp_path):
    for name in "abcde":
        (tmp_path / f"{name}.properties").write_text("number_of_netty_threads=4\n")
    _, printed = doctor(tmp_path)
    assert "  a.properties:1, b.properties:1, c.properties:1 and 2 more: Without" in printed
    assert "d.properties" not in printed
    _, printed = doctor(tmp_path, "--verbose")
    assert "d.properties:1, e.properties:1: Without" in printed


def test_nothing_of_torchserves_is_told_with_another_exit_status(doctor, tmp_path):
    (tmp_path / "gradle.properties").write_text("org.gradle.jvmargs=-Xmx1g\n")
    (tmp_path / "app.py").write_text("import os\n")
    status, printed = doctor(tmp_path)
    assert (status, "contains no TorchServe files" in printed) == (
        2,
        True,
    )
    status, printed = doctor(tmp_path / "gone")
    assert (status, "does not exist" in printed) == (2, True)


def test_strict_counts_what_differs_and_ignored_rules_do_not_count(doctor, tmp_path):
    (tmp_path / "config.properties").write_text("number_of_netty_threads=4\n")
    assert doctor(tmp_path)[0] == 0
    assert doctor(tmp_path, "--strict")[0] == 1
    status, printed = doctor(tmp_path, "--strict", "--ignore", "config-no-effect")
    assert status == 0
    assert "nothing to change (1 ignored)." in printed


def test_the_members_of_the_json_document_stand_on_the_page(capsys, tmp_path):
    (tmp_path / "config.properties").write_text("debug=true\n# nothing\njob_queue_size=5\n")
    assert main([str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    section = PAGE.partition("\n## JSON\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", section))
    assert named >= document.keys() | document["findings"][0].keys()
    assert document["counts"].keys() == {level.value for level in {*map_levels()}}


def map_levels() -> list[Any]:
    return [*type(next(iter(RULES.values())).level)]


def test_every_option_is_on_the_page():
    hidden = {"-h", "--help", "--insecure"}
    options = {o for action in build_parser()._actions for o in action.option_strings} - hidden
    assert {option for option in options if option not in PAGE} == set()


def test_no_rule_is_without_a_check():
    package = ROOT / "tools" / "doctor"
    files = (path for path in package.rglob("*.py") if path.name != "rules.py")
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    assert {rule for rule in RULES if f'"{rule}"' not in code} == set()


def test_every_link_leads_to_a_heading():
    code = (path.read_text("utf-8") for path in (ROOT / "tools" / "doctor").rglob("*.py"))
    written = re.findall(r'"((?:docs/|README)[\w/-]*\.md(?:#[\w-]+)?)"', "".join(code))
    for link in {*written, *(rule.link for rule in RULES.values())} - {""}:
        file, _, anchor = link.partition("#")
        text = (ROOT / file).read_text(encoding="utf-8")
        headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}
        assert not anchor or anchor in anchors, link


# -- configuration ---------------------------------------------------------------------------------


def test_a_token_switch_anywhere_in_the_setup_counts(findings, tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("inference_address=http://0.0.0.0:8080\n")
    assert rules(findings(tmp_path)) == ["tokens"]
    (tmp_path / "start.sh").write_text("#!/bin/sh\nexec torchserve --foreground --dt\n")
    assert rules(findings(tmp_path)) == []
    (tmp_path / "start.sh").write_text("#!/bin/sh\nexec torchserve --foreground\n")
    (tmp_path / "Dockerfile").write_text("FROM x\nENV TS_DISABLE_TOKEN_AUTHORIZATION=true\n")
    assert rules(findings(tmp_path)) == ["environment-ignored", "tokens"]
    config.write_text("inference_address=http://0.0.0.0:8080\nenable_envvars_config=true\n")
    assert rules(findings(tmp_path)) == []


def test_a_cpu_launcher_that_may_not_fit_the_machine(findings, tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("cpu_launcher_enable=true\ncpu_launcher_args=--node_id 0\n")
    (found,) = findings(tmp_path)
    assert (found["rule"], found["line"]) == ("cpu-launcher", 1)
    assert "run_cpu --node_id 0 --no_python hostname" in found["do"]


def test_a_script_that_registers_where_that_is_off(findings, tmp_path):
    config, script = tmp_path / "config.properties", tmp_path / "load.sh"
    script.write_text("# torchserve\ncurl -X POST 'http://torchserve:8081/models?url=m.mar'\n")
    config.write_text("management_address=http://127.0.0.1:8081\n")
    assert rules(findings(tmp_path)) == []  # on while every listener is private
    config.write_text("management_address=http://0.0.0.0:8081\n")
    assert rules(findings(tmp_path)) == ["model-api", "tokens"]
    config.write_text("management_address=http://0.0.0.0:8081\nenable_model_api=true\n")
    assert rules(findings(tmp_path)) == ["tokens"]


def test_configurations_in_config_maps_are_read_and_not_written(findings, tmp_path):
    (tmp_path / "map.yaml").write_text(
        "apiVersion: v1\nkind: ConfigMap\ndata:\n  other.txt: x\n  config.properties: |\n"
        "    inference_address=http://0.0.0.0:8080\n    io_ratio=5\n    job_queue_size=many\n"
    )
    found = findings(tmp_path)
    assert [(each["rule"], each["file"], each["line"]) for each in found] == [
        ("config-value", "map.yaml/config.properties", 3),
        ("tokens", "map.yaml/config.properties", 1),
        ("config-no-effect", "map.yaml/config.properties", 2),
    ]
    assert not any(each["fixable"] for each in found)
    assert main([str(tmp_path), "--write", "--yes"]) == 1


def test_files_that_a_configuration_names_are_read_with_it(findings, tmp_path):
    logs, metrics = tmp_path / "log4j2.xml", tmp_path / "metrics.yaml"
    logs.write_text(
        '<Configuration><Appenders><Kafka name="MODEL_LOG"/></Appenders></Configuration>'
    )
    metrics.write_text("model_metrics: 7\n")
    config = tmp_path / "config.properties"
    config.write_text(
        f"model_store={tmp_path}\nmetrics_config={metrics}\n"
        f"vmargs=-Dlog4j.configurationFile={logs} -Xmx1g\n"
    )
    found = findings("--ts-config", config)
    assert sorted(rules(found)) == ["config-no-effect", "log4j", "metrics-file"]


APPENDERS = """<Configuration><Appenders>
  <Console name="out"><BurstFilter level="WARN"/><HtmlLayout/></Console>
  <Console name="fine"><RegexFilter regex=".*"/></Console>
  <RollingFile name="file" fileName="a.log"/>
</Appenders><Loggers><Logger name="org.pytorch.serve"/></Loggers></Configuration>"""


def test_parts_of_appenders_are_reported_in_a_log_file_of_any_name(findings, tmp_path):
    (tmp_path / "logging.xml").write_text(APPENDERS)
    (tmp_path / "pom.xml").write_text("<project>org.pytorch.serve</project>")
    assert [each["what"].split(" has no")[0] for each in findings(tmp_path)] == [
        "Appender out: BurstFilter",
        "Appender out: HtmlLayout",
        "Appender file is left out: it",
    ]


@pytest.mark.parametrize("text", ["mlflow-torchserve==0.2.0", "MLflow_torchserve"])
def test_a_plugin_that_brings_torchserve_along(findings, tmp_path, text):
    (tmp_path / "requirements.txt").write_text(f"{text}\n")
    (found,) = findings(tmp_path)
    assert "--no-deps mlflow-torchserve" in found["do"]


def test_services_of_a_repository_do_not_speak_for_each_other(findings, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.properties").write_text("metrics_address=http://0.0.0.0:8082\n")
    (tmp_path / "one" / "Dockerfile").write_text('FROM x\nCMD ["torchserve", "--dt"]\n')
    assert [(each["rule"], each["file"]) for each in findings(tmp_path)] == [
        ("tokens", "two/config.properties")
    ]


def test_a_file_of_this_machine_is_checked_with_its_paths_and_store(findings, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    archive(store / "good.mar", HANDLER)
    snapshot = {"name": "s", "modelCount": 1, "models": {"m": {"1.0": {
        "marName": "gone.mar", "minWorkers": 1, "maxWorkers": 1, "batchSize": 1,
        "maxBatchDelay": 100}}}}  # fmt: skip
    config = tmp_path / "config.properties"
    config.write_text(
        f"model_store={store}\nmetrics_config=/no/such.yaml\n"
        f"model_snapshot={json.dumps(snapshot)}\n"
    )
    found = findings("--ts-config", config)
    assert [each["rule"] for each in found] == ["config-path", "model-missing"]
    assert rules(findings(tmp_path)) == ["model-missing"]  # else the paths may be a container's


@pytest.mark.parametrize("key", ["keystore_pass", "load_models", "cors_allowed_origin"])
def test_a_key_that_is_right_is_not_told(findings, tmp_path, key):
    (tmp_path / "config.properties").write_text(f"{key}=all\n")
    assert findings(tmp_path) == []


def test_files_that_cannot_be_read_end_nothing(findings, tmp_path):
    (tmp_path / "config.properties").write_bytes(b"model_store=\\u12\n\xff\xfe\0")
    (tmp_path / "other.properties").write_text("models={]\nmodel_snapshot=[\njob_queue_size=1")
    (tmp_path / "broken.mar").write_bytes(b"no zip")
    (tmp_path / "log4j2.xml").write_text('<Configuration><Logger name="MODEL_LOG"/>')
    (tmp_path / "model-config.yaml").write_text("minWorkers: [1\n")
    (tmp_path / "metrics.yaml").write_text("model_metrics: 7\n")
    (tmp_path / "old_handler.py").write_text("import ts\nprint 'Python 2'\n")
    (tmp_path / "Dockerfile").write_text("FROM pytorch/torchserve\nCMD [torchserve, 'x\n")
    (tmp_path / "loop.sh").symlink_to("loop.sh")
    (tmp_path / "pod.yaml").write_text("image: pytorch/torchserve\n a: [b\n")
    assert sorted(set(rules(findings(tmp_path)))) == [
        "archive-unusable",
        "config-file",
        "config-ignored",
        "config-value",
        "handler-syntax",
        "image",
        "metrics-file",
        "model-yaml",
        "not-read",
    ]


# -- archives and handlers -------------------------------------------------------------------------


def test_a_good_archive_has_no_findings(findings, tmp_path):
    handler = """
import json
import numpy
from ts.torch_handler.base_handler import PT2_AVAILABLE, BaseHandler
from ts.torch_handler import image_classifier
from ts.context import Context
import helper

try:
    import package_that_nobody_has
except ImportError:
    package_that_nobody_has = None

class Handler(BaseHandler):
    def initialize(self, context):
        import another_one
"""
    archive(tmp_path / "m.mar", handler, helper__py="import sys\n")
    assert findings(tmp_path) == []


@pytest.mark.parametrize(
    ("handler", "rule"),
    [
        ("from ts.torch_handler.base_handler import Nonsense\ndef handle(d, c): ...", "import"),
        ("from ts import async_service\ndef handle(d, c): ...", "import"),
        ("class A: ...\nclass B: ...", "class"),
        ("value = 1", "class"),
        ("def handle(data context): ...", "syntax"),
        ("import nobody_has_this\ndef handle(d, c): ...", "requirement"),
        ("import torchtext\ndef handle(d, c): ...", "old"),
    ],
)
def test_a_handler_that_cannot_be_served(findings, tmp_path, handler, rule):
    archive(tmp_path / "m.mar", handler)
    assert rules(findings(tmp_path / "m.mar")) == [f"handler-{rule}"]


def test_requirements_satisfy_imports_under_their_own_names(findings, tmp_path):
    handler = "import cv2\nimport no_such_thing\ndef handle(d, c): ...\n"
    required = "opencv-python-headless>=4\nno.such_thing==1\n"
    archive(tmp_path / "m.mar", handler, requirements__txt=required)
    assert findings(tmp_path) == []


@pytest.mark.parametrize("member", ["../outside.py", "/etc/passwd", "a/../../b"])
def test_an_archive_that_the_server_refuses_is_refused(findings, tmp_path, member):
    path = archive(tmp_path / "m.mar", HANDLER)
    with zipfile.ZipFile(path, "a") as packed:
        packed.writestr(member, "")
    assert rules(findings(path)) == ["archive-unusable"]


def test_an_archive_without_a_manifest_needs_a_default_handler(findings, tmp_path):
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as packed:
        packed.writestr("service.py", HANDLER)
    assert rules(findings(tmp_path)) == ["archive-unusable"]
    (tmp_path / "config.properties").write_text("default_service_handler=service.py:handle\n")
    assert rules(findings(tmp_path)) == []


def test_a_tar_is_read_without_its_first_folder(findings, tmp_path):
    manifest = json.loads(json.dumps(MANIFEST))
    manifest["model"] |= {"handler": "h.py", "serializedFile": "w.pt"}
    files = {"MAR-INF/MANIFEST.json": json.dumps(manifest), "h.py": HANDLER, "w.pt": "0"}
    with tarfile.open(tmp_path / "m.tar.gz", "w:gz") as packed:
        for name, text in files.items():
            info = tarfile.TarInfo(f"m/{name}")
            info.size = len(text)
            packed.addfile(info, io.BytesIO(text.encode()))
    assert findings(tmp_path) == []


def test_plugins_in_java_cannot_be_loaded(findings, tmp_path):
    services = {"ours": "org.pytorch.serve.servingsdk.ModelServerEndpoint", "other": "java.sql.X"}
    for name, service in services.items():
        with zipfile.ZipFile(tmp_path / f"{name}.jar", "w") as jar:
            jar.writestr(f"META-INF/services/{service}", "a.B")
    (tmp_path / "broken.jar").write_bytes(b"")
    (tmp_path / "run.sh").write_text("torchserve --start --plugins-path /plugins\n")
    found = [(each["rule"], each["file"]) for each in findings(tmp_path)]
    assert found == [("java-plugins", "ours.jar"), ("no-effect-flag", "run.sh")]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('exec torchserve --foreground --ts-config "$CONFIG" "$@"', []),
        ("torchserve --start --models $MODELS --ncs", []),
        ('[ -n "$X" ] && torchserve --start $(flags) > log 2>&1 &', []),
        ("torchserve --stop; sleep 1; TS_CONFIG_FILE=x torchserve --start", []),
        ('su -c "torchserve --start --nonsense"', []),  # in a string: not looked into
        ("torchserve --start --workers 4 $MORE", ["command-flag"]),
        ("torchserve --start --stop", ["command-flag"]),
        ("torchserve --start --cpp-log-config x.xml", ["no-effect-flag"]),
        ("torchserve --start --plugins-path /plugins", ["no-effect-flag"]),
        ("git clone --depth 1 https://github.com/pytorch/serve.git /serve", ["package"]),
        ("python serve/ts_scripts/install_from_src.py", ["package"]),
        ("pip install git+https://github.com/pytorch/serve", ["package"]),
        ("# as in https://github.com/pytorch/serve", []),
    ],
)
def test_commands_in_scripts(findings, tmp_path, line, found):
    (tmp_path / "start.sh").write_text(f"#!/bin/bash\n{line}\n")
    assert rules(findings(tmp_path)) == found


def test_files_of_others_are_passed_over(findings, tmp_path):
    (tmp_path / "config.properties").write_text("job_queue_size=7\n")
    (tmp_path / "log4j.properties").write_text("log4j.rootLogger=debug\nlog4j.logger.x=INFO, y\n")
    others = tmp_path / "others"
    others.mkdir()
    with tarfile.open(others / "backup.tar.gz", "w:gz") as packed:
        link = tarfile.TarInfo("a/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        packed.addfile(link)
    (others / "data.tar.gz").write_bytes(b"no archive")
    (others / "pod.yaml").write_text("kind: Pod\nspec: {containers: [{image: nginx}]}\n")
    (others / "requirements.txt").write_text("flask\n")
    (others / "run.sh").write_text("#!/bin/sh\nnginx\ntail -f /dev/null\n")
    assert findings(tmp_path) == []
    assert rules(findings(others / "data.tar.gz")) == ["archive-unusable"]


def test_what_a_gpu_model_could_gain(findings, tmp_path):
    handler = "from ts.torch_handler.base_handler import BaseHandler\nclass H(BaseHandler): ...\n"
    settings = "deviceType: gpu\nminWorkers: 2\nmaxWorkers: 2\n"
    path = archive(tmp_path / "m.mar", handler, **{"model-config__yaml": settings, "net__py": ""})
    assert rules(findings(path)) == ["batching"]  # nobody knows what has been traced or saved
    manifest = json.loads(json.dumps(MANIFEST))
    manifest["model"] |= {
        "handler": "handler.py", "modelFile": "net.py", "configFile": "model-config.yaml"
    }  # fmt: skip
    folder = tmp_path / "m"
    (folder / "MAR-INF").mkdir(parents=True)
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps(manifest))
    (folder / "handler.py").write_text(handler)
    (folder / "net.py").write_text("")
    (folder / "model-config.yaml").write_text(settings)
    assert rules(findings(folder)) == ["batching", "precision"]


# -- --write ---------------------------------------------------------------------------------------


def test_files_are_written_with_a_backup_and_then_there_is_nothing_to_mend(doctor, tmp_path):
    config = tmp_path / "config.properties"
    before = "# ours\nenable_model_api=truejob_queue_size=7\nio_ratio=50\n"
    config.write_text(before)
    config.chmod(0o640)
    docker = tmp_path / "Dockerfile"
    docker.write_text(
        "FROM docker.io/pytorch/torchserve:0.12.0-gpu AS base\n"
        "RUN pip install -U torchserve==0.12.0 torch-model-archiver \\\n"
        "    torch-workflow-archiver requests\n"
    )
    (tmp_path / "run.sh").write_text("torchserve --start --ncs\n\n# wait\ntail -f /dev/null\n")
    (tmp_path / "requirements.txt").write_text("numpy\ntorchserve\ntorch-model-archiver\n")
    _, printed = doctor(tmp_path, "--write", "--yes", "--image", "registry/ours:1")
    assert "--- a/config.properties\n+++ b/config.properties\n" in printed
    assert "-FROM docker.io/pytorch/torchserve:0.12.0-gpu AS base\n" in printed
    assert config.read_text() == "# ours\nenable_model_api=true\njob_queue_size=7\n"
    assert stat.S_IMODE(config.stat().st_mode) == 0o640
    assert config.with_name("config.properties.orig").read_text() == before
    assert docker.read_text() == (
        "FROM registry/ours:1 AS base\nRUN pip install -U 'marserve[grpc]' \\\n    requests\n"
    )
    assert (tmp_path / "run.sh").read_text() == (
        "exec torchserve --start --foreground --ncs\n\n# wait\n"
    )
    assert (tmp_path / "requirements.txt").read_text() == "numpy\nmarserve[grpc]\n"
    _, printed = doctor(tmp_path, "--write", "--yes")
    assert printed.endswith("--write has nothing to fix.\n")


@pytest.mark.parametrize(
    ("line", "written"),
    [
        ("docker run -p 80:8080 pytorch/torchserve:latest", "docker run -p 80:8080 marserve"),
        ('IMAGE="pytorch/torchserve-kfs:0.9.0" # ours', 'IMAGE="marserve" # ours'),
        ('IMAGE="pytorch/torchserve:dev-$MACHINE"', None),
        ("docker build -t pytorch/torchserve:ours .", None),
        ('DOCKER_TAG="pytorch/torchserve:latest"', None),
        ("# once it was pytorch/torchserve:0.1", None),
    ],
)
def test_images_in_scripts(doctor, tmp_path, line, written):
    script = tmp_path / "run.sh"
    script.write_text(f"# torchserve\n{line}\n")
    doctor(script, "--write", "--yes")
    assert script.read_text() == f"# torchserve\n{written or line}\n"


def test_lines_that_mean_more_than_they_seem_are_left_alone(doctor, tmp_path):
    config = tmp_path / "config.properties"
    text = (
        "cors_allowed_origin=a\x0cb\u2028c\r\nio_ratio=\\\r\n  5\r\n"
        "enable_model_api=truemodel_store=C:\\\\store\r\nuse_native_io=true\r\njob_queue_size=5"
    )
    config.write_bytes(text.encode())
    status, _ = doctor(config, "--write", "--yes")
    assert status == 0
    assert config.read_bytes().decode() == text.replace("use_native_io=true\r\n", "")


def test_at_a_terminal_it_asks(tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("io_ratio=1\njob_queue_size=1\n")
    command = [sys.executable, "-m", "marserve", "doctor", str(config), "--write"]
    for answer, said in (("n", "nothing was written"), ("y", "the original is config.prop")):
        with contextlib.closing(Terminal()) as terminal:
            terminal.start(command, os.environ, tmp_path)
            terminal.wait("Write this file? [y/N] ")
            assert config.read_text() == "io_ratio=1\njob_queue_size=1\n"
            terminal.type(f"{answer}\n")
            terminal.wait(said)
    assert config.read_text() == "job_queue_size=1\n"


def test_a_backup_never_replaces_an_older_one(doctor, tmp_path):
    config = tmp_path / "config.properties"
    for text in ("io_ratio=1\njob_queue_size=1\n", "io_ratio=2\njob_queue_size=2\n"):
        config.write_text(text)
        doctor(config, "--write", "--yes")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.properties", "config.properties.orig", "config.properties.orig.1"]


def test_without_a_terminal_nothing_is_written_unasked(doctor, tmp_path, monkeypatch):
    (tmp_path / "config.properties").write_text("io_ratio=1\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    status, printed = doctor(tmp_path, "--write")
    assert status == 2
    assert "-io_ratio=1" in printed
    assert "Use --yes to write." in printed
    assert [path.name for path in tmp_path.iterdir()] == ["config.properties"]


def test_a_file_that_cannot_be_written_stays_whole(doctor, tmp_path):
    config = tmp_path / "config.properties"
    config.write_text("io_ratio=1\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # as on a full disk
    try:
        status, printed = doctor(config, "--write", "--yes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (status, "cannot be written" in printed) == (2, True)
    assert config.read_text() == "io_ratio=1\n"


def test_a_file_that_changed_behind_the_diff_is_not_written(doctor, tmp_path, monkeypatch):
    config = tmp_path / "config.properties"
    config.write_text("io_ratio=1\n")

    def edit_and_agree(_):
        config.write_text("io_ratio=2\n")
        return "y"

    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", edit_and_agree)
    status, printed = doctor(config, "--write")
    assert (status, "has changed since the diff" in printed) == (2, True)
    assert config.read_text() == "io_ratio=2\n"
    assert [*tmp_path.iterdir()] == [config]


def test_a_file_with_two_names_is_written_once_and_stays_one(doctor, tmp_path):
    config, link = tmp_path / "config.properties", tmp_path / "config2.properties"
    config.write_text("io_ratio=1\nmodel_store=x\n")
    link.symlink_to(config.name)
    status, printed = doctor(tmp_path, "--write", "--yes")
    assert (status, printed.count("wrote ")) == (0, 1)
    assert link.is_symlink()
    assert link.read_text() == "model_store=x\n"


@pytest.mark.parametrize("before", [b"\xef\xbb\xbf", "# \u00e9\n".encode("latin-1")])
def test_a_file_keeps_its_encoding(doctor, tmp_path, before):
    config = tmp_path / "config.properties"
    config.write_bytes(before + b"io_ratio=1\nmodel_store=x\n")
    assert doctor(config, "--write", "--yes")[0] == 0
    assert config.read_bytes() == before + b"model_store=x\n"


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("curl -f localhost:8080/ping", "requests /ping, which needs a token"),
        ("curl localhost:8081/models/m | grep READY", "requests /models, which needs a token"),
        ("pgrep -f org.pytorch.serve.ModelServer", "process org.pytorch.serve.ModelServer"),
        ("pgrep java || exit 1", "the process java"),
        ("curl -f localhost:8080/ready", ""),
    ],
)
def test_what_probes_ask(findings, tmp_path, command, what):
    (tmp_path / "Dockerfile").write_text(f"FROM x\nHEALTHCHECK --retries=3 CMD {command}\n")
    probe = json.dumps({"exec": {"command": ["sh", "-c", command]}})
    (tmp_path / "pod.yaml").write_text(
        "spec:\n  containers:\n  - image: pytorch/torchserve\n"
        f"    livenessProbe: {probe}\n    readinessProbe: {{tcpSocket: {{port: 8080}}}}\n"
    )
    told = [each for each in findings(tmp_path) if each["rule"] == "probe"]
    assert [(each["file"], what in each["what"]) for each in told] == (
        [("Dockerfile", True), ("pod.yaml", True)] if what else []
    )


@pytest.mark.parametrize(
    ("line", "address", "is_told"),
    [
        ("until curl -sf localhost:8080/ping; do sleep 1; done", "0.0.0.0", True),
        ("while ! wget -q http://ts:8081/models; do sleep 1; done", "0.0.0.0", True),
        ("until curl -sf localhost:8080/ping; do sleep 1; done", "127.0.0.1", False),
        ("until curl -sf localhost:8080/ready; do sleep 1; done", "0.0.0.0", False),
    ],
)
def test_a_loop_that_waits_for_a_path_with_a_token(findings, tmp_path, line, address, is_told):
    (tmp_path / "config.properties").write_text(f"inference_address=http://{address}:8080\n")
    (tmp_path / "wait.sh").write_text(f"#!/bin/sh\n{line}\n")
    told = [each["line"] for each in findings(tmp_path) if each["rule"] == "probe"]
    assert told == ([2] if is_told else [])


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("pkill -f org.pytorch.serve.ModelServer", True),
        ("until ps aux | grep -v grep | grep java; do sleep 1; done", True),
        ("kill $(pidof java)", True),
        ("grep -r java/ docs", False),
        ("torchserve --stop  # and no pkill java", False),
    ],
)
def test_scripts_that_look_for_java(findings, tmp_path, line, is_told):
    (tmp_path / "stop.sh").write_text(f"#!/bin/sh\n# torchserve\n{line}\n")
    told = [each for each in findings(tmp_path) if each["rule"] == "java-process"]
    assert [each["line"] for each in told] == ([3] if is_told else [])


@pytest.mark.parametrize(
    "line",
    ["log_config=log4j2.xml", "vmargs=-Xmx1g -Dlog4j.configurationFile=file:///l/log4j2.xml"],
)
def test_a_configuration_may_name_the_logs_of_a_container(doctor, tmp_path, line):
    (tmp_path / "Dockerfile").write_text(
        'FROM pytorch/torchserve\nCMD ["torchserve", "--start", "--foreground"]\n'
    )
    (tmp_path / "config.properties").write_text("model_store=/store\n")
    assert "neither the access log" in doctor(tmp_path)[1]
    (tmp_path / "config.properties").write_text(f"model_store=/store\n{line}\n")
    assert "neither the access log" not in doctor(tmp_path)[1]
