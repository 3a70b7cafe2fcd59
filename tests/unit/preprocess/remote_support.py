"""A web server with byte ranges and fault injection."""

from __future__ import annotations

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["none", "cut", "reset", "gone", "short", "once"]


@dataclass
class WebServer:
    """Serves that many byte-range requests, then injects a fault."""

    files: dict[str, bytes]
    fault: Fault = "none"
    good: int = 0
    asked: list[str] = field(default_factory=list)
    port: int = 0
    redirects: dict[str, str] = field(default_factory=dict)

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/{name}"


@contextmanager
def serving(web: WebServer) -> Iterator[WebServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(web))
    web.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield web
    finally:
        server.shutdown()
        server.server_close()


def _handler_for(web: WebServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            name = self.path.lstrip("/").partition("?")[0]
            if name in web.redirects:
                self.send_response(302)
                self.send_header("Location", web.redirects[name])
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            content = web.files.get(name)
            if content is None:
                self.send_error(404)
                return
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            part = content[int(found[1]) : int(found[2] or len(content)) + 1] if found else content
            faulty = False
            if body and found:
                web.asked.append(found[0])
                faulty = web.fault != "none" and len(web.asked) > web.good
                if web.fault == "once":
                    faulty = len(web.asked) == web.good + 1
            if faulty and web.fault == "gone":
                self._reset()
                return
            if faulty and web.fault == "short":
                part = part[: len(part) // 2]
            self.send_response(206 if found else 200)
            self.send_header("Content-Length", str(len(part)))
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("ETag", f'"{hash(content)}"')
            if found:
                self.send_header("Content-Range", f"bytes {found[1]}-{int(found[1]) + len(part) - 1}/{len(content)}")
            self.end_headers()
            if body:
                self.wfile.write(part[: len(part) // 2] if faulty and web.fault != "short" else part)
                self.wfile.flush()
            if faulty and web.fault in ("cut", "once"):
                self.close_connection = True
            if faulty and web.fault == "reset":
                self._reset()

        def _reset(self) -> None:
            """Closes the connection with a reset."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True

    return Handler
