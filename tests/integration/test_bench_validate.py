"""marserve bench --validate: whether answers are others when requests share batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

MARSERVE = Path(sys.executable).with_name("marserve")
FAITHFUL = """
def handle(data, context):
    return data and [{"y": row["body"]["x"] * 2.0} for row in data]
"""
SWAPPING = FAITHFUL.replace("for row in data]", "for row in (data[1:] + data[:1])]")
DRIFTING = """
def handle(data, context):
    return data and [{"y": row["body"]["x"] * 2.0 + 0.01 * (len(data) - 1)} for row in data]
"""


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.json").write_text(json.dumps({"x": number + 0.5}))
    return folder


def validate(server, name, *arguments):
    """Exit status, standard output, standard error."""
    listeners = {"": "inference", "management-": "management", "metrics-": "metrics"}
    urls = [
        f"--{kind}url=http://127.0.0.1:{server.ports[listener]}"
        for kind, listener in listeners.items()
    ]
    line = [MARSERVE, "bench", name, "--validate", *urls, *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_faithful_handler(server, install, inputs):
    name = install("", FAITHFUL, batch_size=4, max_batch_delay=50)
    status, printed, complaints = validate(server, name, "--input", inputs, "--batch-size", "2,4")
    assert (status, complaints) == (0, ""), printed
    first, second = printed.splitlines()
    assert first.startswith("batch size 2: ")
    assert ", 4; largest difference 0, tolerated 0.0001" in second or "of: 4;" in second
    assert server.describe(name)["batchSize"] == 4


def test_a_handler_that_mixes_rows_up(server, install, inputs):
    name = install("", SWAPPING, batch_size=4, max_batch_delay=50)
    status, _, complaints = validate(server, name, "--input", inputs)
    assert status == 1
    assert complaints.startswith("marserve bench: Batching changes answers: input ")
    assert ": the answer to input " in complaints


def test_a_tolerance(server, install, inputs):
    name = install("", DRIFTING, batch_size=4, max_batch_delay=50)
    status, _, complaints = validate(server, name, "--input", inputs)
    assert status == 1
    assert ": y: " in complaints
    assert validate(server, name, "--input", inputs, "--tolerance", 0.1)[0] == 0


def test_without_batches_nothing_is_proved(server, install, inputs):
    name = install("", FAITHFUL)
    status, printed, complaints = validate(server, name, "--input", inputs, "--clients", 4)
    assert (status, printed.count("in batches of: 1;")) == (1, 1)
    assert complaints.startswith("marserve bench: No batches were formed")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--generate", "bytes"], "failed: 503"),
        (["--input", "{inputs}/0.json"], "needs at least two different inputs"),
        (["--input", "{inputs}", "--tune", "50"], "--tune: --validate measures nothing."),
        (["--input", "{inputs}", "--json", "x"], "--json: --validate measures nothing."),
    ],
)
def test_what_cannot_be_compared(server, install, inputs, arguments, told):
    name = install("", FAITHFUL, batch_size=4)
    given = [each.format(inputs=inputs) for each in arguments]
    status, _, complaints = validate(server, name, *given)
    assert status in (1, 2)
    assert told in complaints


def test_inputs_that_are_made_up(server, install):
    source = "def handle(data, context):\n    return data and [bytes(r['body']) for r in data]\n"
    name = install("", source, batch_size=8, max_batch_delay=20)
    status, printed, complaints = validate(server, name, "--generate", "bytes:64")
    assert (status, complaints) == (0, ""), printed


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "import random\ndef handle(d, c):\n    return d and [random.random() for r in d]\n",
            "same",
        ),
        ("def handle(d, c):\n    return d and ['fine' for r in d]\n", "All inputs have the same"),
    ],
)
def test_answers_that_prove_nothing(server, install, inputs, source, told):
    name = install("", source, batch_size=4)
    status, _, complaints = validate(server, name, "--input", inputs)
    assert status == 1
    assert told in complaints
