"""The least version of TLS that this process speaks, which gRPC takes from the environment when it is imported.

So this module imports nothing of gRPC, and what begins a daemon calls it before anything that does.
"""

import os
import sys

_VARIABLE = "GRPC_SSL_CIPHER_SUITES"
_NO_OLDER_SUITE = "ECDHE-PSK-AES128-CBC-SHA"
"""Of TLS 1.2, and usable only with a pre-shared key, which nobody has."""


def only_tls_1_3() -> None:
    """Let gRPC agree on TLS 1.3 only: its suites are not configurable and stay, of the older ones none is left.

    Where gRPC is imported already this does nothing: tried with grpcio 1.85.1, TLS 1.2 would still be spoken.
    """
    if "grpc" not in sys.modules:
        os.environ[_VARIABLE] = _NO_OLDER_SUITE


def is_tls_1_3_only() -> bool:
    """Tell whether it was called in time."""
    return os.environ.get(_VARIABLE) == _NO_OLDER_SUITE
