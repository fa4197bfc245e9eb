"""Several jobs of a search, as real processes that are told what to do (share_job.py)."""

import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import share_job


class Job:
    """A job process that is told what to do."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any]) -> None:
        self.errors = folder / f"{name}.err"
        defaults: dict[str, Any] = {
            "log": str(folder / "log"),
            "errors": str(self.errors),
            "environment": {name: os.environ[name] for name in ("EVERSTEP_SOCKET", "TMPDIR")},
        }
        self.process, self.channel = share_job.start(defaults | settings)

    def tell(self, **command: Any) -> None:
        self.channel.send(command)

    def hear(self) -> Any:
        try:
            return self.channel.recv()
        except EOFError:
            raise AssertionError(self.errors.read_text()) from None

    def ask(self, **command: Any) -> Any:
        self.tell(**command)
        return self.hear()

    def take(self, count: int) -> list[list[float]]:
        return [row for batch in self.ask(take=count) for row in batch]

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.channel.close()
        self.process.join(30)
        self.process.kill()
        self.process.join()
        self.process.close()


class Search:
    """Starts jobs and knows what each must get."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[Job] = []

    def begun(self, loader: dict[str, Any] | None = None, **settings: Any) -> Job:
        job = Job(self.folder, f"job{len(self.jobs)}", {"loader": loader or {}, **settings})
        self.jobs.append(job)
        return job

    def prepared(self) -> Counter[tuple[int, float]]:
        """Return how often each sample of each epoch was prepared, by whomever."""
        lines = [line.split() for line in (self.folder / "log").read_text().splitlines() if line != "hangs"]
        return Counter((int(index), float(value)) for index, value in lines)

    def wait_for(self, text: str) -> None:
        for _ in range(3000):
            if (self.folder / "log").exists() and text in (self.folder / "log").read_text():
                return
            threading.Event().wait(0.01)
        raise AssertionError(f"{text} never came")
