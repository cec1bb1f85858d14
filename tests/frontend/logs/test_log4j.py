import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from marserve.frontend.logs.config import configure_logging, read_log_config
from marserve.frontend.logs.formats import log_entries
from marserve.frontend.logs.levels import OFF
from marserve.frontend.logs.log4j import Translation

#: Configures the logs by a file, logs something, returns the text of each file.

APPENDERS = """
<Configuration>
  <Properties><Property name="where">${{sys:folder:-nowhere}}/sub</Property></Properties>
  <Appenders>
    <Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="%-5p %m%n"/></Console>
    <Console name="STDERR" target="SYSTEM_ERR">
      <PatternLayout><Pattern>%m%n</Pattern></PatternLayout>
    </Console>
    <RollingFile name="server" fileName="${{env:LOG_LOCATION:-logs}}/server.log"
        filePattern="${{env:LOG_LOCATION:-logs}}/$${{date:yyyy-MM}}/server-%i.log.gz">
      <PatternLayout pattern="%d{{ISO8601}} [%-5p] %t %c{{1}} - %m%n"/>
      <Policies><SizeBasedTriggeringPolicy size="40 B"/><TimeBasedTriggeringPolicy/></Policies>
      <DefaultRolloverStrategy max="2"/>
    </RollingFile>
    <Async name="later"><AppenderRef ref="access"/></Async>
    <File name="access" fileName="${{where}}/access.log"><JsonLayout compact="true"/></File>
    <File name="metrics" fileName="${{where}}/metrics.log"><JSONPatternLayout/></File>
  </Appenders>
  <Loggers>{loggers}</Loggers>
</Configuration>
"""
#: TorchServe's own file, its appenders written once.
ROLLING = """
    <RollingFile name="{0}" fileName="${{env:{1}:-logs}}/{0}.log"
        filePattern="${{env:{1}:-logs}}/{0}.%d{{dd-MMM}}.log.gz">
      <PatternLayout pattern="{2}"/>
      <Policies><SizeBasedTriggeringPolicy size="100 MB"/><TimeBasedTriggeringPolicy/></Policies>
      <DefaultRolloverStrategy max="5"/>
    </RollingFile>"""
FINISHED, LINE = "%d{ISO8601} - %m%n", "%d{ISO8601} [%-5p] %t %c - %m%n"
SHIPPED = f"""<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders>
    {ROLLING.format("access_log", "LOG_LOCATION", FINISHED)}
    <Console name="STDOUT" target="SYSTEM_OUT"><PatternLayout pattern="{LINE}"/></Console>
    {ROLLING.format("model_log", "LOG_LOCATION", LINE)}
    {ROLLING.format("model_metrics", "METRICS_LOCATION", FINISHED)}
    {ROLLING.format("ts_log", "LOG_LOCATION", LINE)}
    {ROLLING.format("ts_metrics", "METRICS_LOCATION", FINISHED)}
  </Appenders>
  <Loggers>
    <Logger name="ACCESS_LOG" level="info"><AppenderRef ref="access_log"/></Logger>
    <Logger name="io.netty" level="error"/>
    <Logger name="MODEL_LOG" level="all"><AppenderRef ref="model_log"/></Logger>
    <Logger name="MODEL_METRICS" level="all"><AppenderRef ref="model_metrics"/></Logger>
    <Logger name="org.apache" level="off"/>
    <Logger name="org.pytorch.serve" level="debug"><AppenderRef ref="ts_log"/></Logger>
    <Logger name="TS_METRICS" level="all"><AppenderRef ref="ts_metrics"/></Logger>
    <Logger name="TELEMETRY_METRICS" level="all"><AppenderRef ref="telemetry_metrics"/></Logger>
    <Root level="info"><AppenderRef ref="STDOUT"/><AppenderRef ref="ts_log"/></Root>
  </Loggers>
</Configuration>
"""


@dataclass
class Entry:
    text: str
    members: dict[str, Any] = field(default_factory=dict)
    at: float = 5.0


@pytest.fixture
def apply(tmp_path, monkeypatch):
    monkeypatch.setenv("LOG_LOCATION", str(tmp_path / "logs"))
    monkeypatch.setenv("METRICS_LOCATION", str(tmp_path / "metrics"))

    def applied(text, log, name="log4j2.xml"):
        path = tmp_path / name
        path.write_text(text)
        properties = {"folder": str(tmp_path)}
        with configure_logging(tmp_path, tmp_path, path, properties=properties):
            log()
        found = [file for file in tmp_path.rglob("*") if file.is_file() and file != path]
        return {str(file.relative_to(tmp_path)): file.read_text(errors="replace") for file in found}

    return applied


def xml(loggers: str) -> str:
    return APPENDERS.format(loggers=loggers)


def with_appender(appender: str) -> str:
    return f"""<Configuration><Appenders>{appender}</Appenders>
        <Loggers><Root level="info"><AppenderRef ref="A"/></Root></Loggers></Configuration>"""


def translated(text: str, name: str = "log4j2.xml") -> Translation:
    translation = read_log_config(Path(name), {}, content=text.encode())
    assert isinstance(translation, Translation)
    return translation


def log_server(*texts: str) -> None:
    for text in texts:
        logging.getLogger("marserve.frontend.server").warning("%s", text)


def test_the_file_that_torchserve_ships_gives_its_files(apply, capsys):
    def log():
        log_server("hello")
        logging.getLogger("MODEL_LOG").info("out")
        log_entries(logging.getLogger("ACCESS_LOG"), [Entry("a"), Entry("b")], as_json=False)
        log_entries(logging.getLogger("TS_METRICS"), [Entry("x")], as_json=False)

    files = {name: text.splitlines() for name, text in apply(SHIPPED, log).items()}
    assert {name: len(lines) for name, lines in files.items()} == {
        "logs/access_log.log": 2,
        "logs/model_log.log": 1,
        "logs/ts_log.log": 6,
        "metrics/model_metrics.log": 0,
        "metrics/ts_metrics.log": 1,
    }
    assert files["logs/model_log.log"][0].endswith(" [INFO ] main MODEL_LOG - out")
    assert files["logs/access_log.log"][1].endswith(":05,000 - b")
    assert len(capsys.readouterr().out.splitlines()) == 6
    assert translated(SHIPPED).remarks == ["Logger TELEMETRY_METRICS with level 'all' is ignored."]


def test_appenders_become_files_of_their_layout(apply, capsys):
    def log():
        log_server("hello")
        log_entries(logging.getLogger("ACCESS_LOG"), [Entry("a"), Entry("b")], as_json=False)
        entries = [Entry("x", {"MetricName": "X"}), Entry("y", {"MetricName": "Y"})]
        log_entries(logging.getLogger("TS_METRICS"), entries, as_json=False)

    files = apply(
        xml("""
        <Logger name="org.pytorch.serve" level="info"><AppenderRef ref="server"/></Logger>
        <Logger name="ACCESS_LOG" level="info" additivity="false">
          <AppenderRef ref="later"/>
        </Logger>
        <AsyncLogger name="TS_METRICS" level="all" additivity="false">
          <AppenderRef ref="metrics"/>
        </AsyncLogger>
        <Root level="warn"><AppenderRef ref="STDOUT"/></Root>
        """),
        log,
    )
    assert files["logs/server.log"].endswith(" [WARN ] main server - hello\n")
    access = [json.loads(line) for line in files["sub/access.log"].splitlines()]
    assert [(line["message"], line["loggerName"], line["level"]) for line in access] == [
        ("a", "ACCESS_LOG", "INFO"),
        ("b", "ACCESS_LOG", "INFO"),
    ]
    assert access[0]["instant"] == {"epochSecond": 5, "nanoOfSecond": 0}
    assert files["sub/metrics.log"] == '{"MetricName": "X"}\n{"MetricName": "Y"}\n'
    assert capsys.readouterr().out == "WARN  hello\n"


def test_policies_and_strategy_decide_about_the_rollover(apply, tmp_path):
    loggers = '<Root level="info"><AppenderRef ref="server"/></Root>'
    files = apply(xml(loggers), lambda: log_server("1", "2", "3", "4"))
    old = sorted(file.name for file in tmp_path.glob("logs/*/*"))
    assert old == ["server-2.log.gz", "server-3.log.gz"]
    assert files["logs/server.log"].endswith("- 4\n")


@pytest.mark.parametrize(
    ("additivity", "root", "out", "err"),
    [
        ("true", "STDOUT", "WARN  x\n", "x\n"),
        ("false", "STDOUT", "", "x\n"),
        ("true", "STDERR", "", "x\n"),  # not twice
    ],
)
def test_additivity(additivity, root, out, err, apply, capsys):
    loggers = f"""
        <Logger name="org.pytorch.serve" additivity="{additivity}">
          <AppenderRef ref="STDERR"/>
        </Logger>
        <Root level="info"><AppenderRef ref="{root}"/></Root>
        """
    apply(xml(loggers), lambda: log_server("x"))
    assert capsys.readouterr() == (out, err)


@pytest.mark.parametrize(
    ("model", "root", "out", "err"),
    [
        ("level='error'", "", "WARN  w\nERROR e\n", "e\n"),
        ("", "level='error'", "ERROR e\n", "w\ne\n"),
    ],
)
def test_a_reference_to_an_appender_may_have_a_level(model, root, out, err, apply, capsys):
    def log():
        for level, text in ((logging.INFO, "i"), (logging.WARNING, "w"), (logging.ERROR, "e")):
            logging.getLogger("MODEL_LOG").log(level, text)

    text = xml(f"""
        <Logger name="MODEL_LOG" level="info"><AppenderRef ref="STDERR" {model}/></Logger>
        <Root level="info"><AppenderRef ref="STDOUT" {root}/></Root>
        """).replace("</PatternLayout>", '</PatternLayout><ThresholdFilter level="warn"/>')
    text = text.replace('"%-5p %m%n"/>', '"%-5p %m%n"/><ThresholdFilter level="warn"/>')
    apply(text, log)
    assert capsys.readouterr() == (out, err)


LEVELS_XML = """<?xml version="1.0" encoding="UTF-8"?>
<Configuration xmlns="http://logging.apache.org/log4j/2.0/config">
  <Loggers>
    <Root level="warn"/>
    <Logger name="org.pytorch.serve" level="DEBUG" additivity="false"/>
    <AsyncLogger name="ACCESS_LOG" level="off"/>
    <Logger name="MODEL_LOG"><level value="error"/></Logger>
    <Logger name="io.netty" level="error"/>
    <Logger name="org.pytorch.serve.wlm" level="error"/>
    <Logger name="TS_METRICS" level="loud"/>
    <Logger name="MODEL_METRICS"/>
  </Loggers>
</Configuration>
"""
LEVELS_PROPERTIES = """
rootLogger.level = warn
logger.ts.name = org.pytorch.serve
logger.ts.level = DEBUG
logger.a.name = ACCESS_LOG
logger.a.level = off
logger.MODEL_LOG.level = error
logger.n.name = io.netty
logger.n.level = error
logger.w.name = org.pytorch.serve.wlm
logger.w.level = error
logger.t.name = TS_METRICS
logger.t.level = loud
"""


@pytest.mark.parametrize(
    ("name", "text"), [("l.xml", LEVELS_XML), ("l.properties", LEVELS_PROPERTIES)]
)
def test_levels_are_translated_and_the_rest_has_remarks(name, text):
    translation = translated(text, name)
    levels = {each: options.get("level") for each, options in translation.loggers.items()}
    levels.pop("MODEL_METRICS", None)
    assert levels == {
        "root": logging.WARNING,
        "marserve": logging.DEBUG,
        "ACCESS_LOG": OFF,
        "MODEL_LOG": logging.ERROR,
    }
    assert translation.remarks == [
        "Logger org.pytorch.serve.wlm with level 'error' is ignored.",
        "Logger TS_METRICS with level 'loud' is ignored.",
    ]


@pytest.mark.parametrize("appender", ["", '<Kafka name="A"/>'])
def test_levels_apply_to_the_usual_files_if_no_appender_has_a_counterpart(appender, apply):
    def log():
        logging.getLogger("marserve.api").debug("shown")
        logging.getLogger("MODEL_LOG").warning("hidden")
        logging.getLogger("ACCESS_LOG").critical("hidden")

    loggers = f"<Appenders>{appender}</Appenders><Loggers>"
    files = apply(LEVELS_XML.replace("<Loggers>", loggers), log)
    assert "marserve.api - shown" in files["ts_log.log"]
    assert "log4j2.xml: Logger org.pytorch.serve.wlm with" in files["ts_log.log"]
    assert files["model_log.log"] == files["access_log.log"] == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("log4j.properties", "log4j.rootLogger = OFF\nlog4j.logger.ACCESS_LOG = INFO, access_log"),
        (
            "log4j.xml",
            '<log4j:configuration xmlns:log4j="http://jakarta.apache.org/log4j/">'
            '<root><level value="OFF"/></root></log4j:configuration>',
        ),
    ],
)
def test_a_file_of_log4j_1_has_no_effect_but_a_warning(name, text, apply):
    files = apply(text, lambda: log_server("hello"), name)
    assert "hello" in files["ts_log.log"]
    assert f"{name}: It is written for log4j 1" in files["ts_log.log"]
    assert len(files) == 5


PROPERTIES = """
property.name = model
appender.console.type = Console
appender.console.name = STDOUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %m%n
appender.console.filter.threshold.type = ThresholdFilter
appender.console.filter.threshold.level = warn
appender.rolling.type = RollingFile
appender.rolling.name = MODEL
appender.rolling.fileName = ${env:LOG_LOCATION}/${name}.log
appender.rolling.filePattern = ${env:LOG_LOCATION}/${name}-%d{MM-dd}-%i.log
appender.rolling.layout.type = PatternLayout
appender.rolling.layout.pattern = <%m>%n
appender.rolling.policies.type = Policies
appender.rolling.policies.size.type = SizeBasedTriggeringPolicy
appender.rolling.policies.size.size = 10MB
appender.rolling.strategy.type = DefaultRolloverStrategy
appender.rolling.strategy.max = 3
logger.model.name = MODEL_LOG
logger.model.level = info
logger.model.additivity = false
logger.model.appenderRef.m.ref = MODEL
"""


@pytest.mark.parametrize(
    "root",
    [
        "rootLogger.level = info\nrootLogger.appenderRef.c.ref = STDOUT",
        "rootLogger = info\nrootLogger.appenderRef.c.ref = STDOUT",
        "rootLogger = info, STDOUT",
    ],
)
def test_properties_have_the_effect_of_xml(root, apply, capsys):
    def log():
        logging.getLogger("MODEL_LOG").info("out")
        logging.getLogger("root").info("hidden")
        log_server("hello")

    assert apply(PROPERTIES + root, log, "log4j2.properties")["logs/model.log"] == "<out>\n"
    assert capsys.readouterr() == ("hello\n", "")


@pytest.mark.parametrize(
    ("attributes", "shown"),
    [
        ("", "ping 200\n"),
        ('onMatch="ACCEPT" onMismatch="DENY"', "ping 200\n"),
        ('onMatch="DENY" onMismatch="ACCEPT"', "a ping 200\n"),
    ],
)
def test_a_regex_filter_matches_whole_messages(apply, capsys, attributes, shown):
    text = f"""<Console name="A"><PatternLayout pattern="%m%n"/>
        <RegexFilter regex="ping \\d+" {attributes}/></Console>"""
    apply(with_appender(text), lambda: log_server("ping 200", "a ping 200"))
    assert capsys.readouterr() == (shown, "")


@pytest.mark.parametrize(
    ("appender", "remark"),
    [
        (
            '<Kafka name="A"/>',
            "Appender A is left out: Kafka has no counterpart; console, files and syslog have one.",
        ),
        ('<File name="A"/>', "Appender A is left out: it has no fileName."),
        ('<RollingFile name="A" fileName="a"/>', "Appender A is left out: it has no filePattern."),
        (
            '<RollingFile name="A" fileName="a" filePattern="%i">'
            '<SizeBasedTriggeringPolicy size="big"/></RollingFile>',
            "Appender A is left out: 'big' is not the size of a file.",
        ),
        (
            f'<RollingFile name="A" fileName="a" filePattern="%{"9" * 9}i"/>',
            "Appender A is left out: '%999999999i' is wider than 99 digits.",
        ),
        (
            '<RollingFile name="A" fileName="a" filePattern="%d{yyyy}">'
            '<TimeBasedTriggeringPolicy interval="1000000"/></RollingFile>',
            "Appender A is left out: the interval 1000000 is longer than 100000 periods.",
        ),
        ('<Syslog name="A" facility="x"/>', "Appender A is left out: 'x' is not a facility."),
        ('<Console name="A"><HtmlLayout/></Console>', "HtmlLayout has no counterpart"),
        ('<Console name="A"><BurstFilter/></Console>', "BurstFilter has no counterpart"),
        ('<Console name="A"><RegexFilter/></Console>', "RegexFilter has no regex"),
        ('<Console name="A"><RegexFilter regex="("/></Console>', "RegexFilter has no regex"),
        ('<Console name="A"><PatternLayout pattern="%q"/></Console>', "'%q' has no counterpart"),
        ('<Console name="A"><PatternLayout pattern="${no:x}"/></Console>', "${no:x} has no value"),
        ('<Console name="B"/>', "Logger root: there is no appender 'A'."),
    ],
)
def test_a_remark_names_what_has_no_counterpart(appender, remark):
    (sentence,) = translated(with_appender(appender)).remarks
    assert remark in sentence


def test_a_syslog_that_cannot_be_found_is_left_out(apply, capsys):
    text = with_appender('<Syslog name="A" host="nowhere.invalid"/><Console name="B"/>')
    reference = '<AppenderRef ref="A"/><AppenderRef ref="B"/>'
    apply(text.replace('<AppenderRef ref="A"/>', reference), lambda: None)
    remark = "Appender A is left out: nowhere.invalid:514 cannot be reached"
    assert remark in capsys.readouterr().out


def test_two_appenders_of_one_file_are_one():
    """A second one would continue in the old file after the first has rolled it over."""
    loggers = """<Root><AppenderRef ref="access"/></Root>
        <Logger name="MODEL_LOG"><AppenderRef ref="again"/></Logger>"""
    again = '<File name="again" fileName="${where}/access.log"/></Appenders>'
    translation = translated(xml(loggers).replace("</Appenders>", again))
    assert translation.handlers.keys() == {"access"}
    (remark,) = translation.remarks
    assert remark.endswith("/access.log is written by appender access.")


def test_the_lowest_level_of_the_references_to_an_appender_applies():
    loggers = """<Root><AppenderRef ref="STDOUT" level="error"/></Root>
        <Logger name="MODEL_LOG"><AppenderRef ref="STDOUT" level="warn"/></Logger>"""
    translation = translated(xml(loggers))
    assert translation.handlers["STDOUT"]["level"] == logging.WARNING
    (remark,) = translation.remarks
    assert remark.startswith("Appender STDOUT: its references have several levels")


@pytest.mark.parametrize(
    ("text", "remark"),
    [
        ('<Configuration monitorInterval="30"/>', "monitorInterval has no effect"),
        ('<Property name="a">${a}</Property>', "${a} has no value."),
        ('<a><Property name="a">${b}</Property><Property name="b">${a}</Property></a>', "${b} has"),
        (
            f'<a><Property name="a">{"${a}" * 100}</Property><b c="${{a}}"/></a>',
            "A value with lookups is cut after 100000 characters.",
        ),
    ],
)
def test_a_remark_names_lookups_without_a_value_or_an_end(text, remark):
    assert any(each.startswith(remark) for each in translated(text).remarks)


def test_a_file_may_start_empty(apply, tmp_path):
    (tmp_path / "a.log").write_text("old\n")
    appender = f'<File name="A" fileName="{tmp_path}/a.log" append="false"/>'
    files = apply(with_appender(appender), lambda: log_server("new"))
    assert files["a.log"].count("\n") == 1


def test_a_file_that_cannot_be_opened_is_an_error_and_leaves_nothing_open(apply, tmp_path):
    (tmp_path / "taken").touch()
    text = with_appender(
        f'''<File name="B" fileName="{tmp_path}/b.log"/>
        <File name="C" fileName="{tmp_path}/taken/c.log"/>
        <Async name="A"><AppenderRef ref="B"/><AppenderRef ref="C"/></Async>'''
    )
    before = list(logging.root.handlers)
    with pytest.raises(OSError, match="taken"):
        apply(text, lambda: None)
    assert logging.root.handlers == before
