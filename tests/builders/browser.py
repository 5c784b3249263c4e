"""A real headless browser, for tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

WAIT_S = 30.0


def require_browser() -> tuple[str, str]:
    """Paths of browser and driver; skips where there are none."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("needs Chromium and chromedriver (apt install chromium chromium-driver)")
    return browser, driver


class Browser:
    """One window of it. Waits are for conditions, 30 s at most."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def run(self, script: str, *arguments: Any) -> Any:
        """Value of a function's body in the page."""
        return self.driver.execute_script(script, *arguments)

    def until(self, condition: Callable[[], Any], what: str = "the page never came to it") -> Any:
        """Wait until the condition holds; its value."""
        return WebDriverWait(self.driver, WAIT_S, 0.05).until(lambda _: condition(), what)

    def find(self, css: str) -> WebElement:
        """The first element that matches, waited for."""
        found: WebElement = self.until(lambda: next(iter(self.all(css)), None), f"no {css}")
        return found

    def all(self, css: str) -> list[WebElement]:
        """Elements that match now."""
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def texts(self, css: str) -> list[str]:
        """Their texts now, seen or not."""
        return self.run(
            "return [...document.querySelectorAll(arguments[0])].map(n => n.textContent)", css
        )

    def click(self, css: str, text: str | None = None) -> None:
        """Click the first element that matches, can be seen and says ``text``."""

        def clicked() -> bool:
            try:
                for node in self.all(css):
                    if node.is_displayed() and (text is None or node.text == text):
                        node.click()
                        return True
            except StaleElementReferenceException:
                pass  # drawn anew meanwhile
            return False

        self.until(clicked, f"no {css} that says {text}")

    def type(self, css: str, text: str) -> None:
        """Write into a field, over what is there."""
        field = self.find(css)
        self.until(field.is_displayed, f"{css} is not seen")
        field.clear()
        field.send_keys(text)

    def console(self) -> list[str]:
        """Errors and warnings of the page so far; each is told once."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """A browser whose files all lie in ``folder``; skips where none is installed."""
    browser, driver_path = require_browser()
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,900",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    service = Service(driver_path, env={**os.environ, "TMPDIR": str(temporary)})
    driver = webdriver.Chrome(options=options, service=service)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
