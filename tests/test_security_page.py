"""docs/security.md, compared with the configuration: its limits and the sample file.

Which key each request needs is asked of a server: ``integration/test_security_page.py``.
"""

import re
from pathlib import Path

import pytest

from marserve.backend import manifest
from marserve.backend.protocol import STREAM_WINDOW
from marserve.frontend.archives import download, helper
from marserve.frontend.archives.unpack import ArchiveLimits
from marserve.frontend.batching.sequences.stateful_sequence import _MAX_REMEMBERED
from marserve.frontend.configuration import bounded_yaml
from marserve.frontend.configuration.config import KEYS
from marserve.frontend.configuration.model_schema import MAX_WORKERS
from marserve.frontend.errors import CyclicCall, ServerBusy
from marserve.frontend.grpc import statuses, tensor_messages
from marserve.frontend.http import protocol
from marserve.frontend.rest import parameters
from marserve.frontend.serving.model_calls import MAX_DEPTH
from marserve.frontend.serving.stateful import model_sequences
from marserve.frontend.workers.calls import MAX_CALLS
from marserve.frontend.workflows.specification import MAX_NODES

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
SAMPLE = (ROOT / "config.properties").read_text(encoding="utf-8")
# What a key that bounds something is called.
LIMIT = re.compile(
    r"max_|_timeout$|_rate$|_size$|_seconds$|_kept$|_grace$|_limit|^limit_|_expiration_"
)


LIMITS = sorted(key for key in KEYS if LIMIT.search(key))


@pytest.mark.parametrize("key", LIMITS)
def test_a_limit_is_on_the_page_and_has_its_default_in_the_sample(key):
    assert f"`{key}`" in PAGE.partition("\n## Limits\n")[2].partition("\n## ")[0]
    assert re.search(rf"^#{key}={re.escape(KEYS[key].default or '')}$", SAMPLE, re.MULTILINE)


# By the first words of their rows, in the order of the page.
FIXED = {
    "nodes of a workflow": [MAX_NODES],
    "the id of a sequence": [model_sequences._MAX_ID_CHARACTERS, _MAX_REMEMBERED],
    "the request line": [protocol._MAX_HEAD_BYTES],
    "a connection without": [protocol.IDLE_SECONDS],
    "the JSON": [parameters._MAX_JSON_BYTES],
    "the tensors": [tensor_messages._MAX_MEMBERS],
    "the text of a gRPC": [statuses._MAX_TEXT_BYTES],
    "the name of a model": [manifest._MAX_SEGMENT_BYTES],
    "workers": [MAX_WORKERS],
    "files and directories": [ArchiveLimits().max_entries],
    "unpacked bytes": [ArchiveLimits().ratio_floor_bytes, ArchiveLimits().max_ratio],
    "a manifest": [manifest._MAX_BYTES],
    "a YAML": [bounded_yaml.MAX_BYTES, bounded_yaml.MAX_NODES, bounded_yaml.MAX_DEPTH],
    "the process": [helper._MAX_MEMORY_BYTES, helper._READING_SECONDS],
    "redirects": [download._MAX_REDIRECTS],
    "unread bytes": [STREAM_WINDOW],
    "calls of models": [MAX_CALLS, ServerBusy.status],
    "models of which": [MAX_DEPTH, CyclicCall.status],
}


def test_fixed_limits_are_those_of_the_code():
    rows = PAGE.partition("\n| Fixed | At most |")[2].partition("\n\n")[0].splitlines()[2:]
    for row, (beginning, limits) in zip(rows, FIXED.items(), strict=True):
        assert row.startswith(f"| {beginning}")
        assert [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", row)] == limits
