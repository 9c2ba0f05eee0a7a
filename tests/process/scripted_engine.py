"""A server with vLLM's routes and no model: `python scripted_engine.py SOCKET`.

`update_weights` takes as long as the file `<SOCKET>.hold` exists; while `<SOCKET>.fail` exists the route that it names
answers 500. Every call is written to `<SOCKET>.calls`.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from aiohttp import web


def make_app(socket: str) -> web.Application:
    hold, fail, calls = (Path(f"{socket}.{name}") for name in ("hold", "fail", "calls"))
    state = {"version": "default"}

    async def handle(request: web.Request) -> web.Response:
        path = request.path.strip("/")
        with open(calls, "a") as file:
            file.write(path + "\n")
        if fail.exists() and fail.read_text() == path:
            return web.Response(status=500, text="scripted")
        if path == "update_weights":
            while hold.exists():
                await asyncio.sleep(0.01)
        body = await request.json() if request.can_read_body else {}
        if path == "finish_weight_update":
            state["version"] = body["weight_version"]
        report = {"checksum": "aa", "skipped": [], "missing": [], "seconds": {"load": 0.0, "receive": 0.0}}
        answers = {"weight_info": {"weight_version": state["version"]}, "get_world_size": {"world_size": 1},
                   "collective_rpc": {"results": [report]}}
        return web.Response(text="vllm:generation_tokens_total 0") if path == "metrics" else web.json_response(answers.get(path, {}))

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    return app


if __name__ == "__main__":
    web.run_app(make_app(sys.argv[1]), path=sys.argv[1], print=None)
