"""Models that the start cannot load: the others are served, and the server is not ready."""

import pytest

pytestmark = pytest.mark.integration

FINE = "def handle(data, context):\n    return data and ['{}'] * len(data)\n"


@pytest.fixture(scope="module")
def server(prepare_server, make_archive):
    with prepare_server(default_workers_per_model="1") as server:
        make_archive(server.store, FINE.format("good"), "good")
        make_archive(server.store, FINE.format("good"), "good").rename(server.store / "twin.mar")
        (server.store / "junk-v2.mar").write_text("no archive")
        make_archive(server.store, FINE.format("cut"), "cut", version="3")
        cut = server.store / "cut.mar"
        cut.write_bytes(cut.read_bytes()[:200])
        server.start(
            "--models", "junk-v2.mar", "gone=gone.mar", "good.mar", "twin.mar", "c=cut.mar"
        )
        yield server
        server.stop()


@pytest.fixture
def unready(server):
    def ask():
        server.wait_workers("good", "READY")
        answer = server.inference("GET", "/ready")
        assert answer.status_code == (503 if answer.json().get("models") else 200)
        return answer.json().get("models", [])

    return ask


def test_one_bad_archive_kept_all_models_down(server, unready):
    assert server.predict("good").text == "good"
    assert unready() == ["c", "gone", "junk_v2"]  # the twin of "good" is served already
    assert server.inference("GET", "/ping").status_code == 200
    failed = server.metrics("marserve_failed_loads")
    assert [series.split('"')[1] for series in sorted(failed)] == ["c", "gone", "junk_v2"]
    server.wait_logged("ts_log.log", "Failed to load model: junk-v2.mar: ")
    server.wait_logged("ts_log.log", "Failed to load model: gone.mar: Model not found at: gone.mar")


def test_what_the_apis_say_about_them(server):
    listed = server.management("GET", "/models").json()["models"]
    assert [model["modelName"] for model in listed] == ["c", "gone", "good", "junk_v2"]
    described = server.describe("gone")
    assert (described["state"], described["workers"]) == ("FAILED", [])
    assert described["lastError"] == "Model not found at: gone.mar"
    (listed,) = server.management("GET", "/models/junk_v2/all").json()
    assert listed["modelUrl"] == "junk-v2.mar"
    answer = server.predict("gone")
    assert (answer.status_code, answer.json()["type"]) == (404, "ModelNotFoundException")
    reason = "Model not found: gone. It could not be loaded: Model not found at: gone.mar"
    assert answer.json()["message"] == reason
    assert server.management("PUT", "/models/gone?min_worker=1").status_code == 404
    assert server.management("GET", "/models/never").status_code == 404


def test_they_are_forgotten_when_they_are_registered_or_unregistered(server, unready, make_archive):
    assert server.management("DELETE", "/models/gone").json() == {
        "status": 'Model "gone" unregistered'
    }
    assert server.management("DELETE", "/models/gone").status_code == 404
    assert unready() == ["c", "junk_v2"]

    # Its manifest has another name than its file.
    made = make_archive(server.store, FINE.format("junk"), "junk")
    made.rename(server.store / "junk-v2.mar")
    assert server.register("junk-v2.mar", initial_workers=1).ok
    assert unready() == ["c"]

    assert server.register("cut.mar", model_name="c", initial_workers=1).status_code == 400
    assert unready() == ["c"]
    make_archive(server.store, FINE.format("mended"), "cut", version="3")
    assert server.register("cut.mar", model_name="c", initial_workers=1).ok
    assert unready() == []
    assert server.predict("c/3").text == "mended"
    assert server.describe("c")["workers"]


def test_a_directory_beside_the_archives_is_nobodys_model(prepare_server, make_archive):
    with prepare_server(default_workers_per_model="1") as server:
        make_archive(server.store, FINE.format("good"), "good")
        bad = server.store / "notes" / "MAR-INF"
        bad.mkdir(parents=True)
        (bad / "MANIFEST.json").write_text("{")
        (server.store / "lost+found").mkdir()
        server.start("--models", "all")
        server.wait_workers("good", "READY")
        assert server.inference("GET", "/ready").json() == {"status": "Ready"}
        server.stop()
