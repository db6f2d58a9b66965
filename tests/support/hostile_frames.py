"""What `hostile_tools.misbehave` writes to the executor's socket, at once and in later calls."""

import _thread
import array
import os
import random
import socket
import struct
import sys
import threading
import time
from typing import Any

SOCKET = 3  # where a worker has the executor


def _garbage() -> str:
    os.write(SOCKET, random.Random(1).randbytes(1000))  # other bytes could begin like a frame that never ends
    return "written"


def _zeros() -> str:
    os.write(SOCKET, bytes(10_000))
    return "written"


def _forge() -> None:
    content = b"\0" * 8 + b"\x01" + b'"forged"'
    os.write(SOCKET, struct.pack(">I", len(content)) + content)


def _fake_frame() -> str:
    _forge()
    return "written"


def _huge_frame() -> str:
    os.write(SOCKET, struct.pack(">I", 2**32 - 1))
    time.sleep(60)
    return "written"


def _flood() -> str:
    os.write(SOCKET, struct.pack(">I", 50_000))
    while True:
        os.write(SOCKET, b"x" * 65536)


def _drip() -> str:
    os.write(SOCKET, struct.pack(">I", 50_000))
    while True:
        os.write(SOCKET, b"x")
        time.sleep(0.01)


def _close_socket() -> str:
    os.close(SOCKET)
    return "closed"


def _shut_socket() -> str:
    socket.socket(fileno=os.dup(SOCKET)).shutdown(socket.SHUT_WR)
    return "closed"


def _pass_descriptors() -> str:
    with socket.socket(fileno=os.dup(SOCKET)) as connection:
        rights = array.array("i", [0, 1, 2])
        connection.sendmsg([b"\0\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    return "passed"


# --- after the call


def _late_writer() -> str:
    def write() -> None:
        time.sleep(0.05)
        os.write(SOCKET, b"garbage")

    threading.Thread(target=write, daemon=True).start()
    return "left"


def _late_raw_thread() -> str:
    _thread.start_new_thread(lambda: (time.sleep(0.2), _forge()), ())
    return "left"


def _late_process() -> str:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.02)
            _forge()
        os._exit(0)
    return "left"


def _in_the_next_call(write: Any) -> str:
    """Every call begins with `os.chdir`. An audit hook cannot be removed."""
    sys.addaudithook(lambda event, _: write() if event == "os.chdir" else None)
    return "left"


def _late_hook() -> str:
    return _in_the_next_call(_forge)


def _late_garbage() -> str:
    return _in_the_next_call(lambda: os.write(SOCKET, b"\xff" * 100))


def _late_part_of_a_frame() -> str:
    return _in_the_next_call(lambda: os.write(SOCKET, struct.pack(">I", 50_000)))


def _late_error() -> str:
    content = bytes(8) + b"\0" + b'["WorkerLostError", "forged"]'
    return _in_the_next_call(lambda: os.write(SOCKET, struct.pack(">I", len(content)) + content))
