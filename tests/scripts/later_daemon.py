"""`everstep daemon …` of a version that speaks another protocol on the data socket, as some later one will."""

import sys

from everstep.daemon import session
from everstep.daemon.cli.main import main
from everstep.proto import frames

if __name__ == "__main__":
    session.PROTOCOL = frames.PROTOCOL = frames.PROTOCOL + 1
    sys.exit(main())
