"""`everstep web`: the address, and how a browser gets it."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from everstep.daemon.testing import daemon_process

EVERSTEP = Path(sys.executable).with_name("everstep")


def test_the_address_opens_the_page_and_a_browser_gets_it_by_a_file(
    socket_path: Path, tmp_path: Path
) -> None:
    """A private daemon serves the page from the first `everstep web` on; no command line ever holds the login."""
    seen = tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}\n')
    browser.chmod(0o700)
    with daemon_process(socket_path):
        said = json.loads(subprocess.check_output([EVERSTEP, "web", "--json"], timeout=60))
        with urllib.request.urlopen(said["url"], timeout=10) as answer:
            assert "HttpOnly" in answer.headers["Set-Cookie"]
        told = subprocess.run(
            [EVERSTEP, "web", "--open"], env={**os.environ, "BROWSER": str(browser)}, capture_output=True,
            text=True, check=True, timeout=60,
        )  # fmt: skip
    assert told.stdout == "opened in a browser, logged in as you\n"
    page = Path(seen.read_text().strip().removeprefix("file://"))
    assert page.parent == socket_path.parent
    assert page.stat().st_mode & 0o777 == 0o600
    assert "/login?token=" in page.read_text()
    assert "token" not in seen.read_text()
