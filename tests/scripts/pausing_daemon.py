"""A private daemon, which stops where PAUSE_AT says (see pause.py)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import pause

    del sys.path[0]
    pause.install()
    from everstep.daemon.main import private_main

    sys.exit(private_main())
