import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from marserve.frontend.logs.config import configure_by_file
from marserve.frontend.logs.formats import log_entries

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
    <File name="access" fileName="${{where}}/access.log"><JsonLayout compact="true"/></File>
    <File name="metrics" fileName="${{where}}/metrics.log"><JSONPatternLayout/></File>
    <Async name="later"><AppenderRef ref="access"/></Async>
  </Appenders>
  <Loggers>{loggers}</Loggers>
</Configuration>
"""


@dataclass
class Entry:
    text: str
    members: dict[str, Any] = field(default_factory=dict)
    at: float = 5.0


@pytest.fixture
def apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Configure the logs by a file, log something, return what the files hold then."""
    monkeypatch.setenv("LOG_LOCATION", str(tmp_path / "logs"))

    def applied(
        text: str, log: Callable[[], None], name: str = "log4j2.xml", **options: Any
    ) -> dict[str, str]:
        path = tmp_path / name
        path.write_text(text)
        properties = {"folder": str(tmp_path)}
        with configure_by_file(path, tmp_path, tmp_path, properties=properties, **options):
            log()
        found = [file for file in tmp_path.rglob("*") if file.is_file() and file != path]
        return {str(file.relative_to(tmp_path)): file.read_text(errors="replace") for file in found}

    return applied


def xml(loggers: str) -> str:
    return APPENDERS.format(loggers=loggers)


def log_server(*texts: str) -> None:
    for text in texts:
        logging.getLogger("marserve.frontend.server").warning("%s", text)


def test_appenders_become_files_of_their_layout(
    apply: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def log() -> None:
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


def test_policies_and_strategy_decide_about_the_rollover(
    apply: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
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
def test_additivity(
    additivity: str,
    root: str,
    out: str,
    err: str,
    apply: Callable[..., dict[str, str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    loggers = f"""
        <Logger name="org.pytorch.serve" additivity="{additivity}">
          <AppenderRef ref="STDERR"/>
        </Logger>
        <Root level="info"><AppenderRef ref="{root}"/></Root>
        """
    apply(xml(loggers), lambda: log_server("x"))
    assert capsys.readouterr() == (out, err)


def test_a_reference_to_an_appender_may_have_a_level(
    apply: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def log() -> None:
        for level in (logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger("MODEL_LOG").log(level, logging.getLevelName(level))

    text = xml("""
        <Logger name="MODEL_LOG" level="info"><AppenderRef ref="STDERR" level="error"/></Logger>
        <Root level="info"><AppenderRef ref="STDOUT"/></Root>
        """).replace('pattern="%-5p %m%n"/>', 'pattern="%m%n"/><ThresholdFilter level="warn"/>')
    apply(text, log)
    assert capsys.readouterr() == ("WARNING\nERROR\n", "ERROR\n")


LOG4J_2 = """
property.name = model
appender.console.type = Console
appender.console.name = STDOUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %m%n
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
rootLogger.level = info
rootLogger.appenderRef.c.ref = STDOUT
"""
LOG4J_1 = """
log4j.rootLogger = INFO, console
log4j.appender.console = org.apache.log4j.ConsoleAppender
log4j.appender.console.Target = System.out
log4j.appender.console.layout = org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern = %m%n
log4j.appender.model = org.apache.log4j.RollingFileAppender
log4j.appender.model.File = ${LOG_LOCATION}/model.log
log4j.appender.model.MaxFileSize = 10MB
log4j.appender.model.MaxBackupIndex = 3
log4j.appender.model.layout = org.apache.log4j.PatternLayout
log4j.appender.model.layout.ConversionPattern = <%m>%n
log4j.logger.MODEL_LOG = INFO, model
log4j.additivity.MODEL_LOG = false
"""


@pytest.mark.parametrize("text", [LOG4J_2, LOG4J_1])
def test_properties_have_the_effect_of_xml(
    text: str, apply: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    def log() -> None:
        logging.getLogger("MODEL_LOG").info("out")
        log_server("hello")

    assert apply(text, log, "log4j.properties")["logs/model.log"] == "<out>\n"
    assert capsys.readouterr() == ("hello\n", "")


def test_a_short_logger_may_have_further_properties(
    apply: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
appender.console.type = Console
appender.console.name = STDOUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %m%n
rootLogger = info
rootLogger.appenderRef.c.ref = STDOUT
"""
    apply(text, lambda: log_server("hello"), "log4j2.properties")
    assert capsys.readouterr() == ("hello\n", "")


def test_a_filter_of_properties_is_a_threshold(
    apply: Callable[..., dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
appender.console.type = Console
appender.console.name = STDOUT
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %m%n
appender.console.filter.threshold.type = ThresholdFilter
appender.console.filter.threshold.level = error
rootLogger.level = info
rootLogger.appenderRef.c.ref = STDOUT
"""

    def log() -> None:
        log_server("hidden")
        logging.getLogger("marserve").error("shown")

    apply(text, log, "log4j2.properties")
    assert capsys.readouterr() == ("shown\n", "")


@pytest.mark.parametrize(
    ("attributes", "shown"),
    [
        ("", "ping 200\n"),
        ('onMatch="ACCEPT" onMismatch="DENY"', "ping 200\n"),
        ('onMatch="DENY" onMismatch="ACCEPT"', "a ping 200\n"),
    ],
)
def test_a_regex_filter_matches_whole_messages(
    apply: Callable[..., dict[str, str]],
    capsys: pytest.CaptureFixture[str],
    attributes: str,
    shown: str,
) -> None:
    text = f"""<Configuration><Appenders><Console name="A"><PatternLayout pattern="%m%n"/>
        <RegexFilter regex="ping \\d+" {attributes}/></Console></Appenders>
        <Loggers><Root level="info"><AppenderRef ref="A"/></Root></Loggers></Configuration>"""

    def log() -> None:
        log_server("ping 200")
        log_server("a ping 200")

    apply(text, log)
    assert capsys.readouterr() == (shown, "")


@pytest.mark.parametrize(
    ("appender", "remark"),
    [
        ('<Kafka name="A"/>', "Appender A: Kafka has no counterpart here; it is left out."),
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
        ('<Console name="A"><HtmlLayout/></Console>', "HtmlLayout has no counterpart"),
        ('<Console name="A"><BurstFilter/></Console>', "BurstFilter has no counterpart"),
        ('<Console name="A"><RegexFilter/></Console>', "RegexFilter has no regex"),
        ('<Console name="A"><RegexFilter regex="("/></Console>', "RegexFilter has no regex"),
        ('<Console name="A"><PatternLayout pattern="%q"/></Console>', "'%q' has no counterpart"),
        ('<Console name="A"><PatternLayout pattern="${no:x}"/></Console>', "${no:x} has no value"),
        (
            '<Syslog name="A" host="nowhere.invalid"/>',
            "Appender A is left out: nowhere.invalid:514 cannot be reached",
        ),
        ('<Console name="B"/>', "Logger root: there is no appender 'A'."),
    ],
)
def test_a_remark_names_what_has_no_counterpart(
    appender: str,
    remark: str,
    apply: Callable[..., dict[str, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = f"""<Configuration><Appenders>{appender}</Appenders>
        <Loggers><Root level="info"><AppenderRef ref="A"/></Root></Loggers></Configuration>"""
    apply(text, lambda: None)
    (sentence,) = caplog.messages
    assert remark in sentence
    assert "log4j2.xml" in sentence


@pytest.mark.parametrize("pattern", ["a.log.gz", "a.log", "%i.log"])
def test_the_present_file_is_not_removed_as_an_old_one(
    pattern: str, apply: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    name = "7.log" if "%i" in pattern else "a.log"
    text = f"""<Configuration><Appenders>
        <RollingFile name="A" fileName="{tmp_path}/{name}" filePattern="{tmp_path}/{pattern}">
        <SizeBasedTriggeringPolicy size="1"/><DefaultRolloverStrategy max="1"/></RollingFile>
        </Appenders><Loggers><Root level="info"><AppenderRef ref="A"/></Root></Loggers>
        </Configuration>"""
    files = apply(text, lambda: log_server("1", "2", "3"))
    assert files[name].endswith("- 3\n")
    assert len(files) == 2


def test_two_appenders_of_one_file_lose_nothing_at_a_rollover(
    apply: Callable[..., dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    def log() -> None:
        for number in range(20):
            logging.getLogger("MODEL_LOG").info("model %d", number)
            log_server(f"server {number}")

    rolling = """<RollingFile name="{}" fileName="${{sys:folder}}/one.log"
        filePattern="${{sys:folder}}/one-%i.log">
        <PatternLayout pattern="%m"/><SizeBasedTriggeringPolicy size="40"/>
        <DefaultRolloverStrategy max="100"/></RollingFile>"""
    files = apply(
        f"""<Configuration><Appenders>{rolling.format("A")}{rolling.format("B")}</Appenders>
        <Loggers><Root level="info"><AppenderRef ref="A"/></Root>
        <Logger name="MODEL_LOG" additivity="false"><AppenderRef ref="B"/></Logger>
        </Loggers></Configuration>""",
        log,
    )
    lines = "".join(files.values()).splitlines()
    assert {f"{who} {n}" for who in ("model", "server") for n in range(20)} <= set(lines)
    assert "one.log is written by appender A." in caplog.text


def test_lookups_that_contain_one_another_end(
    apply: Callable[..., dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    apply(
        f"""<Configuration><Properties><Property name="a">{"${a}" * 100}</Property></Properties>
        <Appenders><Console name="A"><PatternLayout pattern="${{a}}%m"/></Console></Appenders>
        <Loggers><Root level="info"/></Loggers></Configuration>""",
        lambda: None,
    )
    assert "A value with lookups is cut after 100000 characters." in caplog.text


def test_a_remark_names_monitorinterval(
    apply: Callable[..., dict[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    apply('<Configuration monitorInterval="30"/>', lambda: None)
    (sentence,) = caplog.messages
    assert "monitorInterval has no effect" in sentence


@pytest.mark.parametrize(
    "text",
    [
        '<Configuration><Property name="a">${a}</Property></Configuration>',
        '<Configuration><Property name="a">${b}</Property><Property name="b">${a}</Property>'
        "</Configuration>",
    ],
)
def test_properties_that_name_each_other_end(
    text: str, apply: Callable[..., dict[str, str]]
) -> None:
    apply(text, lambda: None)


def test_a_file_that_cannot_be_opened_is_an_error_and_leaves_nothing_open(
    apply: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "taken").touch()
    text = f"""<Configuration><Appenders>
        <File name="A" fileName="{tmp_path}/a.log"/><File name="B" fileName="{tmp_path}/taken/b"/>
        </Appenders></Configuration>"""
    with pytest.raises(OSError, match="taken"):
        apply(text, lambda: None)
