"""default_batch_policy=adaptive holds for all models, however they are registered."""

import json

import grpc
import pytest
from grpc_client import GrpcClient
from servers import make_archive

pytestmark = pytest.mark.integration

PLAIN = "def handle(data, context):\n    return data and ['done'] * len(data)\n"
#: TorchServe's archive that names its size and its window: bounds of the adaptive policy.
EXPLICIT = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 4\nmaxBatchDelay: 30\n"
AUTOMATIC = ("adaptive", True, 100)


@pytest.fixture(scope="module")
def server(prepare_server):
    with prepare_server(
        default_batch_policy="adaptive",
        default_workers_per_model="1",
        load_models="all",
        models=json.dumps({"configured": {"1.0": {"batchSize": 6, "maxBatchDelay": 20}}}),
    ) as server:
        for name in ("plain", "configured"):
            make_archive(server.store, PLAIN, name)
        make_archive(server.store, PLAIN, "explicit", EXPLICIT)
        make_archive(server.store, PLAIN, "fixed", "batchPolicy: fixed\n")
        make_archive(server.store, PLAIN, "one_by_one", "continuousBatching: true\n")
        server.start()
        server.wait_workers("plain", "READY")
        yield server
        server.stop()


def served(server, name):
    described = server.describe(name)
    batching = described["batching"]
    size = batching["isAutomatic"] or described["batchSize"]
    return described["batchPolicy"], size, described["maxBatchDelay"]


def test_models_that_are_loaded_at_start(server):
    assert served(server, "plain") == AUTOMATIC
    assert served(server, "explicit") == ("adaptive", 4, 30)
    assert served(server, "configured") == ("adaptive", 6, 20)
    assert served(server, "fixed") == ("fixed", 1, 100)
    assert served(server, "one_by_one") == ("fixed", 1, 100)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, AUTOMATIC),
        ({"batch_size": 8, "max_batch_delay": 50}, ("adaptive", 8, 50)),
        ({"batch_size": -1, "max_batch_delay": -1}, AUTOMATIC),  # as TorchServe's tools write it
        ({"batch_policy": "fixed", "batch_size": 8}, ("fixed", 8, 100)),
    ],
)
@pytest.mark.parametrize("is_json", [False, True])
def test_models_that_are_registered_over_http(server, query, expected, is_json):
    archive = make_archive(server.store, PLAIN, "rest")
    everything = {"url": archive.name, **query}
    how = {"json": everything} if is_json else {"params": everything}
    assert server.management("POST", "/models", **how).status_code == 200
    assert served(server, "rest") == expected
    server.management("DELETE", "/models/rest")


def test_models_that_are_registered_over_grpc(server):
    make_archive(server.store, PLAIN, "remote")
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_ports['management']}") as channel:
        client = GrpcClient(channel)
        for fields, expected in (
            ({}, AUTOMATIC),
            ({"batch_size": 8, "max_batch_delay": 50}, ("adaptive", 8, 50)),
        ):
            client.manage("RegisterModel", url="remote.mar", synchronous=True, **fields)
            assert served(server, "remote") == expected
            client.manage("UnregisterModel", model_name="remote")


def test_a_lone_request_waits_for_no_window(server):
    assert server.predict("explicit").status_code == 200
    (only,) = server.management("GET", "/models/explicit/batches").json()["batches"][-1:]
    assert (only["reason"], only["heldMs"]) == ("work_conserving", 0.0)


def test_models_of_a_snapshot(prepare_server):
    """What was chosen is kept, and the default holds for the rest: it is in the snapshot, too."""
    properties = {"default_workers_per_model": "1", "load_models": "all"}
    with prepare_server(default_batch_policy="adaptive", **properties) as server:
        server.habits = []  # it writes snapshots, and restores the newest
        for name in ("plain", "chosen"):
            make_archive(server.store, PLAIN, name)
        make_archive(server.store, PLAIN, "explicit", EXPLICIT)
        server.start()
        query = {"batch_policy": "greedy", "batch_size": 5}
        assert server.management("PUT", "/models/chosen", params=query).status_code == 200
        server.stop()
        server.start()
        server.wait_printed("restored from the newest snapshot")
        assert served(server, "chosen") == ("greedy", 5, 100)
        assert served(server, "plain") == AUTOMATIC
        assert served(server, "explicit") == ("adaptive", 4, 30)
        server.stop()


def test_models_of_a_snapshot_of_torchserve(prepare_server):
    """It names a size and a window for each model, chosen or not; they bound the policy."""
    member = {"defaultVersion": True, "marName": "plain.mar", "minWorkers": 1, "maxWorkers": 1}
    member |= {"batchSize": 2, "maxBatchDelay": 100, "responseTimeout": 120}
    snapshot = {"name": "s.cfg", "modelCount": 1, "models": {"plain": {"1.0": member}}}
    properties = {"default_batch_policy": "adaptive", "model_snapshot": json.dumps(snapshot)}
    with prepare_server(**properties) as server:
        make_archive(server.store, PLAIN, "plain")
        server.start()
        assert served(server, "plain") == ("adaptive", 2, 100)
        server.stop()
