"""What marserve is held against: aiohttp answering each POST with the body it got, on uvloop.

    python echo.py application [PORT]   what an aiohttp user writes: an application with one route
    python echo.py server [PORT]        the floor below: no application, no router

The first line printed is the port, a free one where none is given.
"""

import asyncio
import sys
from collections.abc import Callable

import uvloop
from aiohttp import web


async def echo(request: web.BaseRequest) -> web.Response:
    """Answer with the body."""
    return web.Response(body=await request.read())


def application() -> web.BaseRunner:
    """One route, no middleware, no access log."""
    app = web.Application()
    app.router.add_post("/echo", echo)
    return web.AppRunner(app, access_log=None)


def server() -> web.BaseRunner:
    """No routing at all."""
    return web.ServerRunner(web.Server(echo, access_log=None))


async def serve(make_runner: Callable[[], web.BaseRunner], port: int) -> None:
    """Listen on loopback until killed."""
    runner = make_runner()
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    runners = {"application": application, "server": server}
    uvloop.run(serve(runners[sys.argv[1]], int(sys.argv[2]) if sys.argv[2:] else 0))
