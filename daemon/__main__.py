"""`python -m everstep.daemon --private --socket PATH`: the form in which the hook starts a daemon for its user."""

import sys

from .main import private_main

sys.exit(private_main())
