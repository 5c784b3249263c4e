"""The page in a real browser, over a real gateway and an engine with the checksum runner."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from sessionkv.actor.gateway_process import GatewayProcess
from sessionkv.config import HttpConfig
from sessionkv.engine.messages import CancelTurn
from sessionkv.types import StepPlan
from tests.builders.browser import Browser, open_browser
from tests.builders.engine import SocketEngine, engine_config, greedy, socket_engine
from tests.builders.gateway import replies
from tests.builders.tenants import KEYS, access

pytestmark = pytest.mark.slow

CHECKS = (Path(__file__).parents[1] / "builders" / "page_checks.js").read_text()
SAID = "A first sentence. And <b>a second</b> one."
ODD = "<img src=x onerror=\"window.hacked=1\"> & 'so' on"


@dataclass(frozen=True)
class Served:
    url: str
    engine: SocketEngine


class Hold:
    """Holds the runner at a step, once armed, until it is told to go on."""

    def __init__(self) -> None:
        self._left: int | None = None
        self._go = threading.Event()

    def __call__(self, plan: StepPlan) -> None:
        del plan
        if self._left is None:
            return
        self._left -= 1
        if self._left == 0:
            self._left = None
            assert self._go.wait(60)

    @contextmanager
    def after(self, steps: int) -> Iterator[None]:
        """Steps go on until so many were begun, and again at the end of the block."""
        self._go.clear()
        self._left = steps
        try:
            yield
        finally:
            self._left = None
            self._go.set()


HOLD = Hold()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Engine on threads of this process, gateway in its own: its sockets are not the tests'."""
    folder = tmp_path_factory.mktemp("engine")
    config = engine_config(folder / "store", blocks=128, host_blocks=96, disk_bytes=8 * 2**20)
    script = {"script": replies(SAID, "Second.")}
    with (
        tempfile.TemporaryDirectory() as socket,
        socket_engine(Path(socket), config, gate=HOLD, runner=script) as engine,
        GatewayProcess(HttpConfig("127.0.0.1", 0)) as gateway,
    ):
        gateway.start({"endpoint": engine.endpoint}, lambda: None, meanwhile=lambda: None)
        with engine.client() as client:  # so that the store's files are open from here on
            client.open("first").turn("Warm up")
            client.flush()
        yield Served(gateway.url, engine)


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, served: Served) -> Iterator[Browser]:
    """The page, loaded anew; it never says anything on the console, and asks nobody else."""
    window.driver.set_window_size(1400, 900)
    window.driver.get(served.url)
    window.run("localStorage.clear(); sessionStorage.clear()")
    connected(window)
    yield window
    assert window.console() == []
    urls = window.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert [url for url in urls if not url.startswith(served.url + "/")] == []
    window.driver.get("about:blank")  # ends its streams


def connected(page: Browser) -> None:
    page.until(lambda: page.texts("#connection") == ["connected"], "the page is not connected")


def say(page: Browser, text: str) -> None:
    """Send a message and wait for its turn's end."""
    before = len(page.all(".badge.final"))
    page.type("#message", text)
    page.click("#send")
    page.until(lambda: len(page.all(".badge.final")) > before and not page.all(".streaming"))


def new_session(page: Browser, name: str) -> None:
    page.click("#new-session")
    page.type("#new-dialog [name=name]", name)
    page.click("#new-dialog button", "Create")
    on_session(page, name)


def on_session(page: Browser, name: str) -> None:
    page.until(lambda: page.texts("#chat-title") == [name], f"{name} is not shown")
    page.until(lambda: name in page.texts(".session"), f"{name} is not listed")


def facts(page: Browser, words: str) -> None:
    page.until(lambda: words in page.texts("#chat-facts")[0], f"{words} is not said")


def check(page: Browser, question: str) -> Any:
    return page.run(f"{CHECKS}\nreturn {question};")


def test_a_turn_streams_and_gets_its_badge(page: Browser, served: Served) -> None:
    new_session(page, "streamed")
    with HOLD.after(8):
        page.type("#message", "Hi")
        page.click("#send")
        page.until(lambda: page.texts(".streaming .text")[0] not in ("", SAID))
        assert SAID.startswith(page.texts(".streaming .text")[0])
        assert page.find(".streaming").get_attribute("aria-busy") == "true"
        assert "first token after" in page.texts(".streaming .badge")[0]
        assert page.find("#stop").is_displayed()
        assert not page.find("#send").is_enabled()
    page.until(lambda: page.all(".badge.final") and not page.all(".streaming"))
    with served.engine.client() as client:
        cache = client.session("streamed").info().last_cache
    assert cache is not None
    badge = page.texts(".badge.final")[0]
    parts = (cache.device_tokens, cache.host_tokens, cache.disk_tokens, cache.computed_tokens)
    words = "{} device + {} host + {} disk + {} computed".format(*parts)
    assert badge.startswith(f"prompt {cache.prompt_tokens}: {words} · first token ")
    assert badge.endswith("first turn")
    page.until(lambda: page.texts(".message .text") == ["Hi", SAID])
    assert page.texts("#spoken p")[:-1] == ["A first sentence.", "And <b>a second</b> one."]
    assert page.texts("#spoken p")[-1] == badge

    say(page, "More")
    second = page.texts(".badge.final")[1]
    assert "nothing missed" in second
    assert page.all(".badge.final .part.device")
    facts(page, "2 turns")
    page.until(
        lambda: page.texts("#miss .miss-why") == ["Nothing that was known was computed again."]
    )


def is_cancelled(served: Served) -> bool:
    """Whether a cancel waits for the core, which is held."""
    waiting = list(served.engine.host.inbox._items)
    return any(isinstance(message, CancelTurn) for message in waiting)


def test_what_was_said_until_a_stop_is_kept(page: Browser, served: Served) -> None:
    new_session(page, "stopped")
    with HOLD.after(8):
        page.type("#message", "Too long")
        page.click("#send")
        page.until(lambda: page.texts(".streaming .text")[0] not in ("", SAID))
        page.click("#stop")
        page.until(lambda: is_cancelled(served), "the engine was not told")
    page.until(lambda: page.all(".badge.final") and not page.all(".streaming"))
    asked, said = page.texts(".message .text")
    assert asked == "Too long"
    assert SAID.startswith(said)
    assert said != SAID
    assert " · stopped · " in page.texts(".badge.final")[0]
    with served.engine.client() as client:
        assert client.session("stopped").info(history=True).messages[-1]["content"] == said


def test_a_turn_that_is_stopped_before_it_says_anything_never_was(
    page: Browser, served: Served
) -> None:
    new_session(page, "unsaid")
    with HOLD.after(1):
        page.type("#message", "Not this")
        page.click("#send")
        page.until(lambda: page.all(".streaming"))
        page.click("#stop")
        page.until(lambda: not page.all(".streaming"))
        page.until(lambda: is_cancelled(served), "the engine was not told")
    assert page.find("#message").get_attribute("value") == "Not this"
    assert not page.find("#alert").is_displayed()
    say(page, "But this")
    page.until(lambda: page.texts(".message .text") == ["But this", SAID])


def test_fork_rewind_pin_and_close(page: Browser, served: Served) -> None:
    new_session(page, "trunk")
    say(page, "one")
    say(page, "two")
    page.click("#chat-actions button", "Fork…")
    page.type("#fork-dialog [name=name]", "branch")
    page.click("#fork-dialog button", "Fork")
    on_session(page, "branch")
    page.until(lambda: page.texts(".message .text") == ["one", SAID, "two", "Second."])

    page.click("#chat-actions button", "Rewind")
    facts(page, "1 turn ·")
    page.until(lambda: page.find("#message").get_attribute("value") == "two")
    page.until(lambda: page.texts(".message .text") == ["one", SAID])

    page.click("#chat-actions button", "Pin…")
    page.type("#pin-dialog [name=minutes]", "5")
    page.click("#pin-dialog button", "Pin")
    facts(page, "pinned in host until")
    page.click("#chat-actions button", "Unpin")
    page.until(lambda: "pinned" not in page.texts("#chat-facts")[0])

    with served.engine.client() as client:
        assert client.session("trunk").info().turns == 2
        page.click("#chat-actions button", "Close…")
        page.click("#close-dialog button", "Close and keep")
        page.until(lambda: not page.find("#close-dialog").is_displayed())
        assert client.session("branch").info().turns == 1
        page.click("#chat-actions button", "Close…")
        page.click("#close-dialog button", "Delete it")
        page.until(lambda: "branch" not in page.texts(".session"))
        assert "branch" not in [info.name for info in client.sessions()]
    assert page.texts("#chat-title") == ["No session yet"]


def test_the_tree_acts_on_any_turn(page: Browser, served: Served) -> None:
    new_session(page, "tree")
    say(page, "one")
    say(page, "two")
    page.until(lambda: len(dots(page, "tree")) == 3)
    page.run("arguments[0].click()", dots(page, "tree")[1])
    page.click(".panel button", "Fork from here…")
    page.type("#fork-dialog [name=name]", "tree fork")
    page.click("#fork-dialog button", "Fork")
    on_session(page, "tree fork")
    page.until(lambda: page.texts(".message .text") == ["one", SAID])
    (fork,) = dots(page, "tree fork")
    assert fork.get_attribute("aria-label") == "Turn 1 of tree fork, where it stands"

    page.click(".panel button", "Rewind 1 turn")  # it is open still
    page.until(lambda: len(dots(page, "tree")) == 2)
    with served.engine.client() as client:
        assert client.session("tree").info().turns == 1


def dots(page: Browser, name: str) -> list[Any]:
    return page.run(
        "return [...document.querySelectorAll('.dots')]"
        ".filter((d) => d.ariaLabel === `Turns of ${arguments[0]}`)"
        ".flatMap((d) => [...d.children])",
        name,
    )


def test_blocks_sink_when_others_press_and_rise_when_they_return(
    page: Browser, served: Served
) -> None:
    new_session(page, "moving")
    say(page, "one")
    places = ["device", "host", "disk", "nowhere"]

    def counts() -> dict[str, int]:
        return dict(zip(places, map(int, page.texts(".lane-count")), strict=True))

    page.until(lambda: counts()["device"] > 10)
    blocks = counts()["device"]
    assert counts() == {"device": blocks, "host": 0, "disk": 0, "nowhere": 0}
    with served.engine.client() as client:
        for number in range(3):
            other = client.open(f"presser {number}")
            other.turn(tokens=[10 + number] * 440, sampling=greedy(4))
        page.until(lambda: counts()["device"] == 0)
        assert counts()["nowhere"] == 0
        assert sum(counts().values()) == blocks
        moved = page.run(
            "return [...document.querySelectorAll('.block')].map((b) => b.style.transform)"
        )
        assert len(moved) == blocks
        assert "translateY(0px)" not in moved
        assert "in host memory" in page.texts("#places-text")[0] + " in host memory"
        page.until(lambda: "100%" in page.texts("#gauges .meter.device + p")[0])
        say(page, "two")
        page.until(lambda: counts()["device"] > blocks)
        badge = page.texts(".badge.final")[-1]
        assert " 0 host + 0 disk" not in badge
        for number in range(3):
            client.delete(f"presser {number}")


def test_names_and_replies_stay_text(page: Browser, served: Served) -> None:
    new_session(page, ODD)
    say(page, "<script>window.hacked = 2</script>")
    page.click("#chat-actions button", "Fork…")
    page.type("#fork-dialog [name=name]", ODD + "2")
    page.click("#fork-dialog button", "Fork")
    on_session(page, ODD + "2")
    page.click(".dot.head")
    page.click("#chat-actions button", "Close…")
    page.until(lambda: page.texts("#close-dialog [data-text]") == [ODD + "2"])
    page.click("#close-dialog [data-cancel]")
    assert page.texts(".message .text")[0] == "<script>window.hacked = 2</script>"
    assert page.all("img") == []
    assert page.all("#log b") == []
    assert page.run("return window.hacked") is None
    with served.engine.client() as client:
        client.delete(ODD)
        client.delete(ODD + "2")


def test_an_error_is_told_and_stays_until_it_was_read(page: Browser, served: Served) -> None:
    new_session(page, "taken")
    page.click("#chat-actions button", "Fork…")
    page.type("#fork-dialog [name=name]", "taken")
    page.click("#fork-dialog button", "Fork")
    page.until(lambda: page.find("#alert").is_displayed())
    assert "taken" in page.texts("#alert-text")[0]
    assert page.find("#alert").get_attribute("role") == "alert"
    with served.engine.client() as client:  # others' doings change nothing of it
        client.open("of another")
        page.until(lambda: "of another" in page.texts(".session"))
    assert page.find("#alert").is_displayed()
    page.console()  # a browser notes each answer that is no success
    page.click("#alert-close")
    assert not page.find("#alert").is_displayed()
    say(page, "still here")


def test_lists_grow_by_pages_and_by_prefix(page: Browser, served: Served) -> None:
    with served.engine.client() as client:
        for number in range(120):
            client.open(f"many {number:03d}")
        page.type("#prefix", "many ")
        page.until(lambda: len(page.all(".row")) == 100)
        assert page.texts("#tree-status") == ["100 sessions so far"]
        page.run("document.getElementById('more').click()")
        page.until(lambda: len(page.all(".row")) == 120)
        assert page.texts("#tree-status") == ["120 sessions"]
        for number in range(120):
            client.delete(f"many {number:03d}")


def test_themes_follow_the_system_and_the_choice(page: Browser) -> None:
    def back() -> str:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    def prefer(scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    prefer("light")
    light = back()
    prefer("dark")
    dark = back()
    assert light != dark
    page.click("#theme", "Theme: automatic")
    assert back() == light
    page.click("#theme", "Theme: light")
    prefer("light")
    assert back() == dark
    page.driver.refresh()
    connected(page)
    assert back() == dark
    page.click("#theme", "Theme: dark")
    assert back() == light
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_has_a_name_and_can_be_read(page: Browser, theme: str) -> None:
    page.run("document.documentElement.dataset.theme = arguments[0]", theme)
    new_session(page, f"readable {theme}")
    say(page, "one")
    page.click(".row.chosen .dot.head")
    page.run(
        "document.getElementById('alert').hidden = false;"
        "document.getElementById('alert-text').textContent = 'An error'"
    )
    assert check(page, "unnamed()") == []
    assert check(page, "badIds()") == []
    assert check(page, "faint(4.5)") == []
    page.run("document.getElementById('alert').hidden = true")
    for name in ("new", "fork", "pin", "close", "key"):
        page.run(f"document.getElementById('{name}-dialog').showModal()")
        assert check(page, "unnamed()") == []
        assert check(page, "faint(4.5)") == []
        page.run(f"document.getElementById('{name}-dialog').close()")
    landmarks = page.run(
        "return ['header', 'nav', 'main', 'aside'].map((t) => document.querySelectorAll(t).length)"
    )
    assert landmarks == [1, 2, 1, 1]
    assert page.run("return document.documentElement.lang") == "en"


def test_with_the_keyboard_alone(page: Browser) -> None:
    def press(*keys: str) -> None:
        ActionChains(page.driver).send_keys(*keys).perform()

    def focused() -> str:
        return page.run(
            "const n = document.activeElement; return n.id || n.ariaLabel || n.textContent"
        )

    press(Keys.TAB)
    assert focused() == "Skip to the message"
    press(Keys.ENTER)
    assert focused() == "message"
    press("By hand", Keys.ENTER)
    page.until(lambda: page.all(".badge.final") and not page.all(".streaming"))
    assert focused() == "message"
    name = page.texts("#chat-title")[0]

    page.run("document.getElementById('prefix').focus()")
    page.until(lambda: name in page.texts(".session"))
    press(Keys.TAB)
    while focused() != f"Turn 1 of {name}, where it stands":
        assert page.run(
            "return getComputedStyle(document.activeElement).outlineStyle !== 'none'"
            " && document.activeElement.matches(':focus-visible')"
        ), focused()
        press(Keys.TAB)
    press(Keys.ARROW_LEFT)
    assert focused() == f"Start of {name}"
    press(Keys.ARROW_RIGHT, Keys.ENTER)
    assert focused() == "Fork from here…"
    press(Keys.ESCAPE)
    assert focused() == f"Turn 1 of {name}, where it stands"
    press(Keys.ENTER, Keys.ENTER)
    page.until(lambda: page.find("#fork-dialog").is_displayed())
    assert page.run("return document.activeElement.name") == "name"
    press(Keys.ESCAPE)
    page.until(lambda: not page.find("#fork-dialog").is_displayed())
    assert focused() == "Fork from here…"


def test_a_narrow_window_shows_one_part_at_a_time(page: Browser) -> None:
    page.driver.set_window_size(500, 800)
    for part in ("Sessions", "Cache", "Chat"):
        page.click(".views button", part)
        shown = [
            pane for pane in ("sessions", "cache", "chat") if page.find(f"#{pane}").is_displayed()
        ]
        assert shown == [part.lower()]
        assert page.run("return document.scrollingElement.scrollWidth <= window.innerWidth")
    new_session_button = page.find("#new-session")
    assert not new_session_button.is_displayed()
    say(page, "narrow")


def test_motion_is_left_out_where_it_is_not_wanted(page: Browser) -> None:
    new_session(page, "still")
    say(page, "one")
    page.until(lambda: page.all(".block"))

    def duration() -> str:
        return page.run(
            "return getComputedStyle(document.querySelector('.block')).transitionDuration"
        )

    assert duration() != "0s"
    feature = {"name": "prefers-reduced-motion", "value": "reduce"}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    assert duration() == "0s"
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_key_is_asked_for_once_and_kept_for_the_tab(window: Browser, tmp_path: Path) -> None:
    service = "the-gateways-own"
    keys = access().with_service(service)
    with (
        tempfile.TemporaryDirectory() as socket,
        socket_engine(Path(socket), engine_config(), access=keys) as engine,
        GatewayProcess(HttpConfig("127.0.0.1", 0)) as gateway,
    ):
        told = {"endpoint": engine.endpoint, "key": service}
        gateway.start(told, lambda: None, meanwhile=lambda: None)
        for name in ("alice", "bob"):
            with engine.client(KEYS[name]) as client:
                client.open(f"of {name}")
        window.driver.get(gateway.url)
        for key in ("wrong", KEYS["alice"]):
            window.until(lambda: window.find("#key-dialog").is_displayed())
            window.type("#key-dialog [name=key]", key)
            window.click("#key-dialog button", "Use it")
        connected(window)
        window.until(lambda: window.texts(".session") == ["of alice"])
        window.until(lambda: "only an operator's key sees it" in window.texts("#gauges p"))
        assert window.run("return Object.values(sessionStorage)") == [KEYS["alice"]]
        assert KEYS["alice"] not in window.run("return JSON.stringify(localStorage)")
        window.driver.refresh()
        connected(window)
        assert not window.find("#key-dialog").is_displayed()
        assert window.run("return document.cookie") == ""
        window.run("sessionStorage.clear()")
        window.driver.get("about:blank")
    window.console()  # it notes the answers 401
