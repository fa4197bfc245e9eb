"""A headless Chromium, driven by the DevTools protocol over a pipe: real pages for tests and for the docs' pictures."""

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

DEADLINE_S = 30.0
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-default-apps", "--disable-extensions",
    "--disable-breakpad", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-zygote", "--mute-audio",
    "--force-color-profile=srgb", "--remote-debugging-pipe",
)  # fmt: skip


def chromium() -> str | None:
    """Return where Chromium is; None: not here."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """One tab."""

    def __init__(self, browser: "Browser", session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []
        """What the console said of errors, policy violations included."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Carry out a command of the protocol."""
        return self._browser.call(method, parameters, self._session)

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Be a screen of this size and taste."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def go(self, url: str) -> None:
        """Open an address."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def evaluate(self, expression: str) -> Any:
        """Return what an expression is on the page, as JSON."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, deadline_s: float = DEADLINE_S) -> Any:
        """Return the expression's value once it is true."""
        until_s = time.monotonic() + deadline_s
        while time.monotonic() < until_s:
            with contextlib.suppress(AssertionError):  # the page may be between two documents
                if value := self.evaluate(expression):
                    return value
            select.select([], [], [], 0.05)
        raise AssertionError(f"never true: {expression}\n{self.evaluate('document.body.innerText')}")

    def text(self, selector: str = "body") -> str:
        """Return what a person reads there."""
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def press(self, key: str, code: int) -> None:
        """Press a key."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        answer = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, fromSurface=True
        )
        path.write_bytes(base64.b64decode(answer["data"]))


class Browser:
    """The process, and its pipe."""

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        program = chromium()
        assert program is not None
        read_theirs, self._write = os.pipe()
        self._read, write_theirs = os.pipe()
        self._number, self._buffer = 0, b""
        self._pages: dict[str, Page] = {}
        self._temporary = tempfile.mkdtemp(prefix="cr-")
        """Short: a socket of Chromium's lies there, whose path ends at 107 bytes."""
        environment = {
            **os.environ,
            "HOME": str(folder),
            "XDG_CONFIG_HOME": str(folder),
            "XDG_CACHE_HOME": str(folder),
            "TMPDIR": self._temporary,
        }

        def pipes() -> None:
            # Out of the way of 3 and 4 first, and to numbers that nothing else has.
            read_end = fcntl.fcntl(read_theirs, fcntl.F_DUPFD_CLOEXEC, 10)
            write_end = fcntl.fcntl(write_theirs, fcntl.F_DUPFD_CLOEXEC, 10)
            os.dup2(read_end, 3)
            os.dup2(write_end, 4)

        self._log = folder / "chromium.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [program, *FLAGS, *flags, f"--user-data-dir={folder / 'profile'}", "about:blank"],
                preexec_fn=pipes,  # noqa: PLW1509 - descriptors only
                close_fds=False, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, start_new_session=True,
            )  # fmt: skip
        os.close(read_theirs)
        os.close(write_theirs)

    def page(self) -> Page:
        """Open a tab."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        self._pages[session] = page
        return page

    def call(self, method: str, parameters: dict[str, Any], session: str = "") -> dict[str, Any]:
        """Carry out a command and return its result; events that come before it are looked at."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        try:
            os.write(self._write, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise self._ended() from None
        until_s = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(until_s)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._heard(answer)

    def _next(self, until_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until_s - time.monotonic()))
            assert ready, "chromium does not answer"
            data = os.read(self._read, 1 << 20)
            if not data:
                raise self._ended()
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _ended(self) -> AssertionError:
        status = self._process.wait(DEADLINE_S)
        return AssertionError(f"chromium has ended, {status}:\n{self._log.read_text(errors='replace')}")

    def _heard(self, event: dict[str, Any]) -> None:
        page = self._pages.get(event.get("sessionId", ""))
        if page is None:
            return
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            page.problems.append(event["params"]["entry"]["text"])
        if event["method"] == "Runtime.exceptionThrown":
            page.problems.append(json.dumps(event["params"]["exceptionDetails"]))

    def close(self) -> None:
        """End it and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(DEADLINE_S)
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._temporary)


@contextlib.contextmanager
def browsing(folder: Path) -> Generator[Browser]:
    """Give a browser with an empty profile."""
    folder.mkdir(exist_ok=True)
    browser = Browser(folder)
    try:
        yield browser
    finally:
        browser.close()
