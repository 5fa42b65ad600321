"Servers for tests: real HTTP on a free port of this machine, and a wire that cuts connections."

import contextlib
import threading
import time
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from rl_notebook.emulator.messages import ON_ERROR
from rl_notebook.emulator.server import EmulatedServer, completions, hot_load
from rl_notebook.emulator.models import Models, Snapshots


@contextlib.contextmanager
def serve(app) -> Iterator[str]:
    "The address of an ASGI app that runs in a thread."
    config = uvicorn.Config(
        app,
        host="127.0.0.1",
        port=0,
        log_level="critical",
        lifespan="on",
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def emulated(model, tokenizer, folder, **options) -> EmulatedServer:
    "A replica that serves this model."
    models = Models((model, tokenizer))
    return EmulatedServer(
        models, Snapshots(folder / "snapshots"), **{"base_model": "tiny"} | options
    )


def app_of(server: EmulatedServer) -> Starlette:
    "Everything that a replica answers, at one address, and the account that the Fireworks SDK asks for."

    async def accounts(request):
        return JSONResponse({"accounts": [{"name": "accounts/local"}]})

    @contextlib.asynccontextmanager
    async def lifespan(app):
        yield
        await server.close()

    return Starlette(
        lifespan=lifespan,
        exception_handlers=ON_ERROR,
        routes=[
            *server.routes(),
            Route(
                "/inference/v1/completions",
                partial(completions, server, style="fireworks"),
                methods=["POST"],
            ),
            Route(
                "/hot_load/v1/models/hot_load", partial(hot_load, server), methods=["GET", "POST"]
            ),
            Route("/v1/accounts", accounts),
        ],
    )
