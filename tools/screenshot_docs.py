"""Takes screenshots of the documentation site in a real browser, in phone and desktop width, light and dark.

Build the site first (tools/build_docs.py). The command fails if a page scrolls sideways, an image does not load or the
console has an error. It also fails if the site's own search does not list a flag and an exit code first.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # runs from a checkout that is not installed
PAGES = ("docs/index", "docs/getting_started", "docs/flags", "docs/parallelism", "docs/api")
SEARCHES = {"--seq-length": "#flag-seq-length", "exit code 14": "#exit-code-14"}
WIDTHS = {390: 844, 1440: 900}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# No sandbox, which root (in a container) cannot use; only the site's own files are opened.
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe")
_SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
_BROKEN = "[...document.images].filter(i => !i.complete || !i.naturalWidth).map(i => i.src).join(' ')"
_LOADED = "Promise.all([...document.images].map(i => (i.loading = 'eager', i.decode().catch(() => 0)))).then(() => 1)"
_RESULT = "document.querySelector('#search-results li a')?.getAttribute('href') ?? ''"


class BrowserError(Exception):
    """A browser that is missing or does not answer."""


class Browser:
    """A headless Chromium, controlled by its debugging protocol: JSON texts with a final zero byte, over two pipes."""

    def __init__(self, program: str) -> None:
        here, theirs = os.pipe(), os.pipe()  # to the browser, from the browser
        self._profile = tempfile.TemporaryDirectory()
        command = [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"]
        # The protocol reads descriptor 3 and writes descriptor 4.
        shell = ["bash", "-c", f'exec 3<&{here[0]} 4>&{theirs[1]}; exec "$@"', "bash", *command]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(shell, pass_fds=(here[0], theirs[1]), stdout=quiet, stderr=quiet)
        os.close(here[0])
        os.close(theirs[1])
        self._to, self._from = os.fdopen(here[1], "wb"), os.fdopen(theirs[0], "rb")
        self._numbers, self._rest, self._session = itertools.count(1), b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        self._to.write(json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0")
        self._to.flush()
        while True:
            message = self._next()
            if message.get("id") == number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self.events.append(message)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._from.fileno(), 1 << 20)
            if not read:
                raise BrowserError("the browser exited before it answered; start it in a shell to see its error")
            self._rest += read
        text, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def value(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression in the page. A promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        return answer["result"].get("value")

    def open(self, url: str, width: int, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": WIDTHS[width], "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")
        self.value(_LOADED)

    def until(self, expression: str, seconds: float = 20) -> bool:
        """Waits until the expression is true. Returns False if it is not true after `seconds`."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            if self.value(expression):
                return True
            time.sleep(0.05)
        return False

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=False)["data"]
        path.write_bytes(base64.b64decode(data))

    def console_errors(self) -> list[str]:
        found = []
        for event in self.events:
            method, given = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(given["exceptionDetails"].get("text")))
            elif method == "Log.entryAdded" and given["entry"]["level"] == "error":
                found.append(given["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and given["type"] == "error":
                found.append(str([each.get("value") for each in given["args"]]))
        return found

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._to.close()
        self._process.terminate()
        self._process.wait(20)
        self._from.close()
        self._profile.cleanup()


def mistakes(browser: Browser) -> list[str]:
    """Returns the faults of the open page."""
    found = [f"console: {text}" for text in browser.console_errors()]
    if (pixels := browser.value(_SIDEWAYS)) > 0:
        found.append(f"scrolls sideways by {pixels} pixels")
    if broken := browser.value(_BROKEN):
        found.append(f"images do not load: {broken}")
    return found


def picture_pages(browser: Browser, site: Path, output: Path) -> list[str]:
    found = []
    for page, width, dark in itertools.product(PAGES, WIDTHS, (False, True)):
        name = f"{page.replace('/', '-')}-{width}-{'dark' if dark else 'light'}"
        browser.open((site / f"{page}.html").resolve().as_uri(), width, dark=dark)
        found += [f"{name}: {mistake}" for mistake in mistakes(browser)]
        browser.screenshot(output / f"{name}.png")
    return found


def try_searches(browser: Browser, site: Path) -> list[str]:
    """Searches the site as a reader does. Returns the texts whose first result does not link to the right row."""
    found = []
    for text, anchor in SEARCHES.items():
        words = text.replace(" ", "+")
        browser.open(f"{(site / 'search.html').resolve().as_uri()}?q={words}", 1440, dark=False)
        browser.until(f"({_RESULT}) !== ''")
        first = browser.value(_RESULT)
        if not first.endswith(anchor):
            found.append(f"search for {text}: the first result is {first or 'nothing'}, not the row {anchor}")
    return found


def find_chromium(given: str | None) -> str:
    program = given if given is not None else next(filter(None, map(shutil.which, NAMES)), None)
    if program is None or shutil.which(program) is None:
        where = f"{given} is not a program" if given is not None else f"none of {', '.join(NAMES)} is on the PATH"
        raise BrowserError(f"--chromium: {where}; install Chromium or give its path")
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chromium", metavar="PATH", help="the browser (default: the first one on the PATH)")
    parser.add_argument("--site", type=Path, default=ROOT / "build" / "site", metavar="DIR", help="the built site")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "screenshots", metavar="DIR")
    arguments = parser.parse_args()
    try:
        program = find_chromium(arguments.chromium)
        if not (arguments.site / "searchindex.js").is_file():
            raise BrowserError(f"--site {arguments.site}: no site; build it with python tools/build_docs.py")
        arguments.output.mkdir(parents=True, exist_ok=True)
        with Browser(program) as browser:
            found = picture_pages(browser, arguments.site, arguments.output) + try_searches(browser, arguments.site)
    except BrowserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join([*found, f"{arguments.output}: {len(PAGES) * len(WIDTHS) * 2} screenshots"]))
    return 1 if found else 0


if __name__ == "__main__":
    from megatron.utils.command_line import run_tool

    sys.exit(run_tool("screenshot_docs.py", main))
