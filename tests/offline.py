"A process that connects to no other machine: the tests, and the JupyterLab and the kernels that they start."

import gc
import os
import sys
from typing import Any

HERE = {"localhost", "::1", "::", "0.0.0.0", os.uname().nodename}


def _stay_here(event: str, args: tuple) -> None:
    "Rejects connections to other machines: a test that needs the network fails at the weather's whim."
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = str(args[1][0])
    elif event == "socket.getaddrinfo":
        host = args[0].decode() if isinstance(args[0], bytes) else str(args[0] or "localhost")
    else:
        return
    if host not in HERE and not host.startswith("127."):
        raise OSError(f"tests do not use the network: {event} to {host}")


def stay_here() -> None:
    "From now on, and until it ends, this process connects to no other machine."
    sys.addaudithook(_stay_here)


def heartbeats() -> list[Any]:
    "What SDK clients in this process keep sending to their services: the tasks that have not ended."
    holders = [o for o in gc.get_objects() if type(o).__name__ == "InternalClientHolder"]
    tasks = [getattr(holder, "_session_heartbeat_task", None) for holder in holders]
    return [task for task in tasks if task is not None and not task.done()]
