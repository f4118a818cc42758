"""Program that asks the server for a fork and represents it: ``client.py SOCKET ARGUMENTS...``.

It runs without site-packages and imports little, because every start of a command waits for it.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress
from types import FrameType

FORWARDED = {
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
}
MAX_ANSWER = 100


def main() -> None:
    path, *arguments = sys.argv[1:]
    is_unbuffered = arguments[:1] == ["-u"]
    if arguments[is_unbuffered:][:1] != ["-m"]:
        os.execv(sys.executable, [sys.executable, *arguments])
    # A signal that arrives before the fork exists is forwarded as soon as it does.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect(path)
    request = {
        "arguments": arguments[is_unbuffered + 1 :],
        "cwd": os.getcwd(),  # noqa: PTH109 - pathlib's import would double the start.
        "environment": dict(os.environ),
        "is_unbuffered": is_unbuffered,
    }
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
    process = int(server.recv(MAX_ANSWER))

    def forward(number: int, _: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, number)

    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = os.waitstatus_to_exitcode(int(server.recv(MAX_ANSWER)))
    if status < 0:
        with suppress(OSError):  # SIGKILL has no handler.
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
