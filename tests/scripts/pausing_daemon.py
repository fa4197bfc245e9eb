"""A daemon, private or with `daemon --config FILE` a node's, which stops where PAUSE_AT says (see pause.py)."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import pause

    del sys.path[0]
    pause.install()
    from everstep.daemon.cli.main import main
    from everstep.daemon.main import private_main

    sys.exit(main() if sys.argv[1:2] == ["daemon"] else private_main())
