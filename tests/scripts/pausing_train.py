"""small_train.py, which stops where PAUSE_AT says (see pause.py)."""

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    import pause

    sys.path.remove(str(HERE))
    pause.install()
    runpy.run_path(str(HERE / "small_train.py"), run_name="__main__")
