"""Models that do not fit into memory: refused or ended by themselves, and at nobody's cost.

The servers run in a control group of their own with little memory, where the tests may make one.
"""

import pytest
from control_groups import memory_group

pytestmark = pytest.mark.integration

MEBIBYTE = 1 << 20
# The server with its fork server and one small worker takes less than half of this.
LIMIT = 400 * MEBIBYTE

HANDLER = """
class Handler:
    def initialize(self, context):
        self.taken = bytearray(b"x") * (context.model_yaml_config["takes"] << 20)

    def handle(self, data, context):
        return [str(len(self.taken) >> 20)] * len(data)
"""


@pytest.fixture(scope="module")
def server(prepare_server, make_archive):
    with memory_group() as group, prepare_server(enable_grpc="false") as server:
        group.limit(LIMIT)
        for name, mebibytes in (("big", 200), ("small", 1), ("endless", 2000)):
            make_archive(server.store, HANDLER, name, f"takes: {mebibytes}")
        server.write_property("min_free_memory_percent", "5")
        (server.store / "heavy").mkdir()
        (server.store / "heavy" / "handler.py").write_text(HANDLER)
        with (server.store / "heavy" / "weights.pt").open("wb") as file:
            file.truncate(LIMIT)
        with group.starting():
            server.launch()
        server.wait_ready()
        yield server
        server.stop()


def test_a_model_whose_files_do_not_fit_is_refused_before_it_takes_anything(server):
    body = {"url": "heavy", "handler": "handler.py", "initial_workers": 1}
    answer = server.management("POST", "/models", json=body)
    assert "KeyError" in answer.json()["message"]  # no other model is there: it was tried
    assert server.register("small.mar", initial_workers=1).status_code == 200
    answer = server.management("POST", "/models", json=body)
    assert answer.status_code == 507
    assert answer.json()["message"].startswith(
        "Not enough memory to load model heavy: its files are 400 MiB for 1 worker(s), and "
    )
    assert not server.is_known("heavy")


def test_a_load_that_takes_all_memory_ends_itself_and_not_the_model_that_serves(server):
    """The kernel ends the largest process otherwise, which is the one that serves."""
    assert server.register("big.mar", initial_workers=1).status_code == 200
    pid = server.worker("big")["pid"]
    answer = server.register("endless.mar", initial_workers=1)
    assert answer.status_code == 507, answer.text
    assert "out of memory" in answer.json()["message"]
    assert not server.is_known("endless")
    assert server.predict("big").text == "200"
    assert server.worker("big")["pid"] == pid
    assert server.management("DELETE", "/models/big").ok
