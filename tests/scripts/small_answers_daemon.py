"""A node's daemon (`daemon --config FILE`) whose control API gives answers of up to 4 KiB instead of 16 MiB."""

import sys

from everstep.daemon.cli.main import main
from everstep.daemon.control import service

ANSWER_BYTES_MAX = 4096

if __name__ == "__main__":
    bound = ("grpc.max_send_message_length", service.RESPONSE_BYTES_MAX)
    service._OPTIONS[service._OPTIONS.index(bound)] = (bound[0], ANSWER_BYTES_MAX)
    sys.exit(main())
