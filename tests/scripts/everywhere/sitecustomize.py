"""For PYTHONPATH: every Python process that is started stops where PAUSE_AT says (see ../pause.py)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import pause

del sys.path[0]
pause.install()
