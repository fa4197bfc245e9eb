"""The page in headless Chromium: a real daemon, a real job that trains with torch, what a person sees and can do."""

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import Page, browsing, chromium

from everstep.daemon.control.client import connected
from everstep.daemon.testing import node_daemon

pytestmark = pytest.mark.skipif(chromium() is None, reason="chromium is not installed")

JOB = """
import time, torch, everstep

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 256
    def __getitem__(self, index): return torch.full((32,), float(index))

torch.manual_seed(0)
torch.set_num_threads(1)
dataset = everstep.CachedDataset(Numbers(), prepared=True, fingerprint="numbers", budget="1MiB")
loader = everstep.DataLoader(dataset, batch_size=16, shuffle=True)
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "loader": loader}
with everstep.attach("<b>gpt</b>", **state, storage=["nvme0", "nvme1"], every=100) as run:
    run.restore()
    for epoch in run.epochs(10**6):
        for x in loader:
            loss = ((model(x) - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.002)
            run.step()
"""
VERDICT = "document.getElementById('verdict')"
FOREIGN = (
    "performance.getEntriesByType('resource').map(e => e.name).filter(n => !n.startsWith(location.origin))"
)
UNLABELLED = """[...document.querySelectorAll('section, svg[role=img], table, meter, [role=group]')]
    .filter(e => e.offsetParent !== null && !e.getAttribute('aria-label') && !e.getAttribute('aria-labelledby'))
    .length"""
CONTRAST = """(() => {
  const parse = c => c.match(/[\\d.]+/g).map(Number);
  const linear = v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const back = e => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const hasText = e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
  const weak = [];
  for (const e of document.querySelectorAll('#content *, header *, footer')) {
    if (!hasText(e) || e.closest('svg') || e.offsetParent === null) continue;
    const [a, b] = [light(parse(getComputedStyle(e).color)), light(back(e))].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) weak.push(`${e.textContent.trim().slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return weak;
})()"""
"""Text whose contrast is below WCAG 2.2's 4.5 to 1."""


@contextmanager
def job() -> Generator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", JOB], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def fits(page: Page) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_a_person_looks_at_a_job(node_config: Path, socket_path: Path, tmp_path: Path) -> None:
    """Login, empty, training, killed, back again, gone: one daemon and one browser for all of it."""
    with browsing(tmp_path / "browser") as browser, node_daemon(node_config, socket_path) as daemon:
        page = browser.page()
        page.look(width=1600)
        with connected(socket_path) as client:
            port = client.status().daemon.metrics_port
            page.go(f"http://127.0.0.1:{port}/")
            page.wait("!document.getElementById('login').hidden")
            assert "everstep web" in page.text("#login")
            assert len(page.problems) == 1, page.problems
            assert "401" in page.problems.pop()  # the console's word for being asked to log in
            page.go(client.open_web_session()[0])
            page.wait(
                "location.pathname === '/' && document.getElementById('verdict')?.className === 'green'"
            )
        assert "All is well: no run is training" in page.text("#verdict")
        assert "everstep.attach(" in page.text("#runs")
        assert "CachedDataset" in page.text("#caches-body")

        with job() as process:
            page.wait("document.querySelectorAll('svg.time rect.written').length >= 2", 60)
            page.wait("/of [0-9,]+ reads/.test(document.getElementById('caches-body').innerText)", 60)
            page.wait("['stall', 'data'].every(each => document.querySelector(`svg.time rect.${each}`))", 60)
            tips = page.evaluate(
                "[...document.querySelectorAll('rect.stall, rect.data')].map(e => e.textContent)"
            )
            assert all("checkpoints" in each and "data" in each for each in tips), tips
            assert "<b>gpt</b>" in page.text("#runs")  # a name is text, whatever stands in it
            assert page.evaluate("document.querySelectorAll('#runs b b').length") == 0
            assert "training" in page.text("#runs")
            page.wait(f"{VERDICT}.innerText.includes('1 run is training')", 60)
            for name in ("nvme0", "nvme1"):
                assert name in page.text("#devices-body")
            assert fits(page)
            for dark in (False, True):
                page.look(width=400, dark=dark)
                page.wait("innerWidth === 400")
                assert fits(page)
                page.wait(f"({CONTRAST}).length === 0")
            page.look(width=1600)
            assert page.evaluate(UNLABELLED) == 0
            assert page.evaluate("document.querySelectorAll('main').length") == 1
            keyboard(page)
            process.send_signal(signal.SIGKILL)
            process.wait()
            page.wait(f"{VERDICT}.innerText.includes('lost its trainer')", 60)
            assert "start it again" in page.text("#verdict")
            assert page.evaluate(f"{VERDICT}.className") == "amber"
        with job():
            page.wait("document.querySelectorAll('svg.time .restored').length >= 1", 60)
            page.wait(f"!{VERDICT}.innerText.includes('lost its trainer')", 60)

        dead_time(page)
        hidden(page)
        assert page.evaluate(FOREIGN) == []
        assert page.problems == []
        daemon.terminate()
        daemon.wait(20)
        page.wait("document.getElementById('fresh').innerText.startsWith('no answer since')")


GAP = """import('/timeline.js').then(({ lane }) => {
  const shares = [[100, 0.1, 0], [105, 0.1, 0], [130, 0.1, 0], [135, 0.1, 0]];
  const events = [{ kind: "rank_lost", unix_s: 107, text: "" }, { kind: "run_attached", unix_s: 127, text: "" }];
  const { svg } = lane({ name: "gpt", shares }, events, 200, 300, 300);
  return [...svg.querySelectorAll("rect.stall")].map(e => [e.getAttribute("x"), e.getAttribute("width")].map(Number));
})"""
"""Where stalls are drawn, a pixel for a second from -100 s on, of a run that nobody trained from 107 s to 127 s."""


def dead_time(page: Page) -> None:
    """What nobody trained is no part of training that stood still."""
    assert page.evaluate(GAP) == [[195, 5], [200, 5], [227, 3], [230, 5]]


def keyboard(page: Page) -> None:
    """What can be done with a mouse can be done with keys, and is seen to be."""
    page.evaluate("document.activeElement.blur(); document.querySelector('[data-range=\"7200\"]').focus()")
    page.press("Enter", 13)
    page.evaluate("document.activeElement.click()")
    assert page.evaluate("document.querySelector('[aria-pressed=true]').innerText") == "2 h"
    page.evaluate("document.querySelector('[data-range=\"300\"]').click()")
    page.evaluate("document.querySelector('.skip').focus()")
    assert page.evaluate("document.querySelector('.skip').getBoundingClientRect().left >= 0")
    assert page.evaluate("document.querySelector('.skip').hash") == "#runs"


def hidden(page: Page) -> None:
    """Nobody is asked while nobody looks."""
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange')); performance.clearResourceTimings()"
    )
    page.wait("new Promise(done => setTimeout(() => done(true), 100))")
    page.evaluate("performance.clearResourceTimings()")
    page.wait("new Promise(done => setTimeout(() => done(true), 2600))")
    assert page.evaluate("performance.getEntriesByType('resource').length") == 0
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait("performance.getEntriesByType('resource').length > 0")
