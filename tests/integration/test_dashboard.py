"""The dashboard in Debian's Chromium, on real servers."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect, sync_playwright
from programs import program
from servers import PATIENCE, Gate, Server, make_archive

pytestmark = pytest.mark.integration

HOSTILE = "<img src=x onerror=alert(1)>\"'&"
FAILING = f"""
def handle(data, context):
    if data is not None:
        raise ValueError({HOSTILE!r})
"""
EMPTY = "def handle(data, context): return data and [b'' for _ in data]"
SCHEMES = ("light", "dark")
PHONE = 360

expect.set_options(timeout=PATIENCE * 1000)


# The browser's loop would be in the way of other modules' tests: it ends with this one.
@pytest.fixture(scope="module")
def browser():
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program("chromium"), args=arguments)
        yield started
        started.close()


@pytest.fixture
def server(share_server):
    """Return a server whose only models are those of the test."""
    with share_server() as shared:
        yield shared


@pytest.fixture
def open_page(browser):
    """Open a page of a server's dashboard; no script may fail or be refused by the policy."""
    with contextlib.ExitStack() as stack:
        troubles = []

        def open_(server, address="", **context):
            page = stack.enter_context(
                contextlib.closing(browser.new_context(**context))
            ).new_page()
            page.set_default_timeout(PATIENCE * 1000)
            page.on("pageerror", lambda error: troubles.append(str(error)))
            page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
            page.on("console", lambda each: troubles.append(each.text) if is_bad(each) else None)
            page.goto(f"http://127.0.0.1:{server.ports['management']}/dashboard#/{address}")
            return page

        yield open_
        assert troubles == []


def is_bad(message: Any) -> bool:
    """Whether a message is not about an answer that failed, of which a test may be."""
    return message.type in ("error", "warning") and "Failed to load resource" not in message.text


@contextlib.contextmanager
def load(server: Server, model: str, **orders: Any) -> Iterator[None]:
    """Ask a model again and again, for a ``with`` block."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            server.ask(model, **orders)

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        is_over.set()
        for client in clients:
            client.join()


def state_of(page: Page) -> Any:
    return page.locator(".connection span")


def card(page: Page, name: str) -> Any:
    return page.locator(".card").filter(has=page.get_by_role("link", name=name, exact=True))


def panel(page: Page, title: str) -> Any:
    return page.locator(".panel").filter(has=page.get_by_role("heading", name=title))


# -- overview --------------------------------------------------------------------------------------


def test_the_overview_follows_the_load(server, handlers, open_page):
    server.install(handlers / "lab.py", "busy")
    page = open_page(server)
    expect(page.get_by_text("Nothing is wrong now.")).to_be_visible()
    expect(card(page, "busy").locator(".workers")).to_have_text("1 ready of 1")
    with load(server, "busy"):
        expect(card(page, "busy").locator(".rate b")).not_to_have_text("0")
        expect(card(page, "busy").locator(".latency")).to_contain_text(re.compile(r"p99 [\d.]+ ms"))


def test_a_crash_loop_is_not_green(server, handlers, open_page):
    server.install(handlers / "lab.py", "crashing")
    page = open_page(server)
    for _ in range(3):
        server.kill_worker("crashing")
    problem = page.locator(".problems li").first
    expect(problem).to_contain_text(
        "have failed 3 times in the last 5 minutes: Worker disconnected."
    )
    expect(page.locator(".card.degraded .workers")).to_have_text(
        "1 ready of 1, 3 failures in 5 minutes"
    )


def test_what_is_wrong_comes_first_and_hostile_text_stays_text(server, open_page):
    server.install(FAILING, "hostile", model_name=HOSTILE)
    page = open_page(server)
    problem = page.locator(".problems li").first
    with load(server, quote(HOSTILE)):
        expect(problem).to_contain_text(f"requests of {HOSTILE} failed in the last minute.")
    expect(card(page, HOSTILE).locator(".errors")).to_contain_text("handler")
    problem.get_by_role("link").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text(HOSTILE)
    page.get_by_role("link", name="Slow requests").click()
    page.get_by_role("link", name="Failed").click()
    expect(page.locator(".row .explanation").last).to_contain_text(HOSTILE)
    assert page.locator("img").count() == 0


def test_a_hundred_models_are_rows_with_a_filter(server, open_page):
    archive = make_archive(server.store, EMPTY, "one")

    def register(number):
        name = f"m{number:02}"
        return server.register(archive, model_name=name, initial_workers=0).status_code

    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(register, range(100))) == {200}
    page = open_page(server)
    expect(page.locator(".models.rows .card")).to_have_count(100)
    page.get_by_label("Filter models").fill("m4")
    expect(page.locator(".card")).to_have_count(10)
    page.get_by_role("button", name="Rows").click()
    expect(page.locator(".models.cards .card")).to_have_count(10)
    page.get_by_role("link", name="m42").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("m42")


# -- a model ---------------------------------------------------------------------------------------


def test_a_model_shows_its_batches_workers_and_costs(server, handlers, open_page):
    server.install(handlers / "lab.py", "watched", batch_size=4, max_batch_delay=5)
    for _ in range(3):
        server.ask("watched")
    page = open_page(server, "models/watched/1.0")
    strip = page.get_by_role("slider", name="Batches")
    expect(strip.locator(".filled")).to_have_count(3)
    server.ask("watched")
    expect(strip.locator(".filled")).to_have_count(4)
    strip.press("ArrowLeft")
    expect(page.locator(".said")).to_contain_text("1 requests, left as window")
    page.get_by_text("as a table").click()
    expect(page.get_by_role("region", name="Batches").locator("tbody tr")).to_have_count(4)
    expect(page.get_by_role("img", name="Mean latency of the last 4 batches")).to_be_visible()
    expect(panel(page, "Cost by batch size")).to_contain_text("Batch size 4")
    server.ask("watched", do="os._exit")
    worker = page.locator(".worker")
    expect(worker.locator(".lane .w-failed")).to_have_count(2)  # it was sent again, alone
    expect(worker.locator("summary")).to_contain_text("changes of state")
    server.wait_workers("watched", "READY")


# -- requests --------------------------------------------------------------------------------------


def test_a_slow_request_is_found_and_explained(server, handlers, tmp_path, open_page):
    server.install(handlers / "lab.py", "slow")
    page = open_page(server, "requests")
    expect(page.get_by_text("There are no requests.")).to_be_visible()
    gate = Gate(tmp_path / "gate")
    client = threading.Thread(target=server.ask, args=("slow",), kwargs={"gate": gate.path})
    client.start()
    gate.wait_entered()
    gate.open()
    client.join()
    row = page.locator(".request")
    row.get_by_role("button").click()
    expect(row.locator(".timeline > .explanation")).to_contain_text(" ms of ")
    expect(row.locator(".events li").last).to_contain_text("answered")
    row.locator(".ids a").click()
    expect(page.get_by_role("heading", name="Request", exact=True)).to_be_visible()
    expect(page.locator(".timeline .events li")).to_have_count(6)
    page.reload()
    expect(page.locator(".timeline .events li")).to_have_count(6)
    page.goto(re.sub(r"requests/.*", "requests/unknown", page.url))
    expect(page.get_by_text("No request of that id is known")).to_be_visible()


# -- try it ----------------------------------------------------------------------------------------


ANSWERS = [
    ({"answer": {"cat": 0.9, "dog": 0.1}}, ".classes tr:first-child", "cat90 %"),
    ({"answer": [{"box": 1, "label": "<b>"}]}, "tbody td:last-child", "<b>"),
    ({"answer": "<b>words</b>", "type": "text/plain"}, "pre", "<b>words</b>"),
    ({"do": "refuse", "message": "not this", "code": 418}, ".error", "not this"),
]


def test_answers_are_rendered(server, handlers, open_page):
    server.install(handlers / "lab.py", "tried")
    page = open_page(server, "models/tried/1.0/try")
    for orders, selector, text in ANSWERS:
        page.get_by_label("JSON or text").fill(json.dumps(orders))
        expect(page.get_by_label("As curl")).to_contain_text(f"'{json.dumps(orders)}'")
        page.get_by_role("button", name="Send").click()
        expect(panel(page, "Answer").locator(selector)).to_have_text(text)
    address = f":{server.ports['inference']}/predictions/tried/1.0"
    expect(page.get_by_label("As Python")).to_contain_text(address)


def test_an_image_is_shown_for_a_file(server, handlers, tmp_path, open_page):
    server.install(handlers / "lab.py", "tried")
    image = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"></svg>'
    file = tmp_path / "it's.json"
    file.write_text(json.dumps({"answer": image, "type": "image/svg+xml"}))
    page = open_page(server, "models/tried/1.0/try")
    page.get_by_label("or a file").set_input_files(file)
    expect(page.get_by_label("As curl")).to_contain_text(r"--data-binary @'it'\''s.json'")
    page.get_by_role("button", name="Send").click()
    shown = panel(page, "Answer").locator("img")
    expect(shown).to_be_visible()
    assert shown.evaluate("image => image.naturalWidth") == 9


def test_text_is_shown_as_it_arrives(server, handlers, tmp_path, open_page):
    server.install(handlers / "streamer.py", "streamer")
    gate = Gate(tmp_path / "gate")
    page = open_page(server, "models/streamer/1.0/try")
    orders = {"id": "s", "pieces": 2, "gate": gate.path}
    page.get_by_label("JSON or text").fill(json.dumps(orders))
    page.get_by_role("button", name="Send").click()
    expect(panel(page, "Answer").locator("pre")).to_have_text("s0;")
    gate.open()
    expect(panel(page, "Answer").locator("pre")).to_have_text("s0;send")


# -- actions ---------------------------------------------------------------------------------------


def test_settings_and_workers_of_a_model_change(server, handlers, open_page):
    server.install(handlers / "lab.py", "changed")
    page = open_page(server, "models/changed/1.0/actions")
    batching, workers = panel(page, "Batching"), panel(page, "Workers")
    batching.get_by_label("Batch size").fill("7")
    batching.get_by_label("Longest wait").fill("3")
    batching.get_by_label("Policy").select_option("greedy")
    batching.get_by_role("button").click()
    expect(batching.locator(".result")).not_to_be_empty()
    batching.get_by_label("Batch size").fill("none")
    batching.get_by_role("button").click()
    expect(batching.locator("p.error")).to_contain_text("batch_size")
    workers.get_by_label("Minimum").fill("2")
    workers.get_by_role("button").click()
    expect(workers.locator(".result")).not_to_be_empty()
    server.wait_workers("changed", "READY", "READY")
    described = server.describe("changed")
    assert (described["batchSize"], described["maxBatchDelay"]) == (7, 3)
    assert described["batchPolicy"] == "greedy"


def test_models_are_registered_made_the_default_and_unregistered(server, open_page):
    for version in ("1.0", "2.0"):
        make_archive(server.store, EMPTY, f"v{version}", version=version)
    server.register("v1.0.mar", model_name="pair", initial_workers=0)
    page = open_page(server, "server")
    register = panel(page, "Register a model")
    register.get_by_label("Archive:").fill("v2.0.mar")
    register.get_by_label("Name").fill("pair")
    register.get_by_label("Workers").fill("0")
    register.get_by_role("button").click()
    expect(register.locator(".result")).to_contain_text("registered")
    page.goto(re.sub("#.*", "#/models/pair/2.0/actions", page.url))
    panel(page, "Default version").get_by_role("button").click()
    expect(page.locator(".title .tag")).to_have_text("default")
    page.get_by_role("link", name="1.0", exact=True).click()
    page.get_by_role("link", name="Actions").click()
    remove = panel(page, "Unregister")
    expect(remove.get_by_role("button")).to_be_disabled()
    remove.get_by_label("Type the model's name").fill("pair")
    remove.get_by_role("button").click()
    expect(page.get_by_text("does not exist for model")).to_be_visible()
    listed = server.management("GET", "/models/pair/all").json()
    assert [each["modelVersion"] for each in listed] == ["2.0"]


def test_the_level_of_a_logger_changes(start_server, open_page):
    with start_server() as server:  # other tests read the logs of the shared one
        page = open_page(server, "server")
        level = page.get_by_label("Level of ACCESS_LOG")
        level.select_option("error")
        expect(level).to_have_value("error")
        assert server.management("GET", "/loggers/ACCESS_LOG").json()["level"] == "error"
        level.select_option("inherit")
        expect(level).not_to_have_value("error")


def test_the_last_lines_of_a_log_are_shown(server, open_page):
    server.management("PUT", "/loggers/marserve", params={"level": "info"})
    for id_ in ("first", "<img/src=x/onerror=alert(1)>"):
        server.inference("GET", "/ping", headers={"X-Request-Id": id_})
    page = open_page(server, "server")
    lines = page.get_by_role("region", name="Lines of the log")
    expect(lines).to_contain_text("Logger marserve was set to the level info.")
    assert lines.evaluate("e => e.scrollTop + e.clientHeight >= e.scrollHeight - 1")
    page.get_by_label("Log file").select_option("access_log.log")
    expect(lines).to_contain_text(re.compile("=first.*<img/src=x/onerror", re.DOTALL))
    server.inference("GET", "/ping", headers={"X-Request-Id": "newest"})
    page.get_by_role("button", name="Read again").click()
    expect(lines).to_contain_text(re.compile("=first.*=newest", re.DOTALL))


# -- the key and the connection --------------------------------------------------------------------


def test_the_page_asks_for_the_key_and_keeps_it_in_memory(start_server, open_page):
    with start_server(disable_token_authorization="false") as server:
        key = json.loads((server.directory / "key_file.json").read_text())["management"]["key"]
        page = open_page(server)
        expect(page.get_by_text("key_file.json")).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
        page.get_by_label("Management key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("does not accept this key")
        page.get_by_label("Management key").fill(key)
        page.keyboard.press("Enter")
        expect(page.get_by_text("Nothing is wrong now.")).to_be_visible()
        page.get_by_role("link", name="Server").click()
        expect(page.get_by_label("Level of root")).to_be_visible()
        stored = "[...Object.keys(localStorage), ...Object.keys(sessionStorage), document.cookie]"
        assert page.evaluate(stored) == [""]
        page.reload()
        expect(page.get_by_label("Management key")).to_be_visible()


def test_the_page_connects_again_to_a_server_that_was_restarted(start_server, open_page):
    with start_server() as server:
        page = open_page(server)
        expect(state_of(page)).to_have_text("live")
        server.stop()
        expect(state_of(page)).to_have_text("disconnected, retrying")
        expect(page.get_by_role("button", name="Retry now")).to_be_visible()
        server.start()
        expect(state_of(page)).to_have_text("live")


# -- for everybody ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_page_is_accessible_and_fits_a_phone(server, handlers, open_page, scheme):
    server.install(handlers / "lab.py", "shown")
    server.install(FAILING, "failing")
    for model in ("shown", "failing"):
        server.ask(model)
    page = open_page(server, color_scheme=scheme)
    for address in ("", "requests", "requests?failed", "server", *(
        f"models/shown/1.0{part}" for part in ("", "/try", "/actions")
    )):  # fmt: skip
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto(re.sub("#.*", f"#/{address}", page.url))
        expect(page.locator(".panel, .card, .request").first).to_be_visible()
        if address.startswith("requests"):
            page.locator(".row").first.click()
        found = Axe().run(page).response["violations"]
        assert [(each["id"], each["nodes"][0]["html"]) for each in found] == []
        page.set_viewport_size({"width": PHONE, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE, address
