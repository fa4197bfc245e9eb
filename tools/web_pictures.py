"""Renew the pictures of the web page in docs/images: a real daemon, two real jobs, and a headless Chromium.

Takes about three minutes. One job is killed and restored, so that there is something to see.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from browser import Page, browsing, chromium  # pyright: ignore[reportMissingImports]

from everstep.daemon.control.client import connected
from everstep.daemon.testing import node_daemon

IMAGES = ROOT / "docs" / "images"
PICTURES = (("web-light.png", 1280, False), ("web-dark.png", 1280, True), ("web-narrow.png", 400, False))
"""Name, width in pixels, dark."""
TRAINING_S = 80.0
AWAY_S = 12.0
"""For so long nobody starts the killed job again."""
JOB = """
import sys, time, torch, everstep

name, width, pause_s, every = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 512
    def __getitem__(self, index):
        time.sleep(0.0005)
        return torch.full((width,), float(index))

torch.manual_seed(0)
torch.set_num_threads(1)
dataset = everstep.CachedDataset(Numbers(), prepared=True, fingerprint=name, budget="16MiB")
loader = everstep.DataLoader(dataset, batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width))
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "loader": loader}
with everstep.attach(name, **state, storage=["nvme0", "nvme1"], every=every) as run:
    run.restore()
    for epoch in run.epochs(10**6):
        for x in loader:
            loss = ((model(x) - x) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(pause_s)
            run.step()
"""


@contextmanager
def job(*arguments: str) -> Generator[subprocess.Popen[bytes]]:
    """Train until the block is left."""
    process = subprocess.Popen([sys.executable, "-P", "-c", JOB, *arguments])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def take(page: Page, folder: Path) -> None:
    """Write the pictures once there is something to see."""
    shown = "document.querySelectorAll('svg.time rect.written').length"
    language, photos = ("language", "256", "0.05", "150"), ("photos", "512", "0.08", "70")
    with job(*language):
        with job(*photos) as first:
            page.wait(f"{shown} >= 16", 180)
            first.send_signal(signal.SIGKILL)
            first.wait()
            page.wait("document.getElementById('verdict').innerText.includes('lost its trainer')", 60)
            time.sleep(AWAY_S)
        with job(*photos):
            page.wait("document.querySelectorAll('svg.time .restored').length >= 1", 60)
            time.sleep(TRAINING_S)
            page.wait("document.getElementById('verdict').className === 'green'", 60)
            for name, width, is_dark in PICTURES:
                page.look(width=width, dark=is_dark)
                page.wait(f"innerWidth === {width}")
                time.sleep(3.0)  # it is drawn every two
                page.picture(folder / name)


def main() -> int:
    if chromium() is None:
        print("needs chromium: apt-get install chromium fonts-dejavu-core", file=sys.stderr)
        return 1
    folder = Path(tempfile.mkdtemp(prefix="es-"))
    try:
        socket_path = folder / "s" / "data.sock"
        lines = ["[daemon]", f'socket = "{socket_path}"', "[devices]"]
        for path in (folder / "nvme0", folder / "nvme1", socket_path.parent):
            path.mkdir(mode=0o700)
        lines += [f'{name} = "{folder / name}"' for name in ("nvme0", "nvme1")]
        config = folder / "node.toml"
        config.write_text("\n".join(lines) + "\n")
        os.environ["EVERSTEP_SOCKET"] = str(socket_path)
        with browsing(folder / "browser") as browser, node_daemon(config, socket_path):
            page = browser.page()
            page.look(width=1280)
            with connected(socket_path) as client:
                page.go(client.open_web_session()[0])
            page.wait("location.pathname === '/'")
            take(page, folder)
        for name, _, _ in PICTURES:
            shutil.move(folder / name, IMAGES / name)
            print(f"docs/images/{name}")
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
