"""A Hub on this machine: the part of its interface that creating a repository, committing large files and downloading
need. Nothing leaves the machine."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

LARGE = (".safetensors", ".bin")  # are sent apart from the commit
_COMMIT = "0123456789abcdef" * 2 + "01234567"


@dataclass
class Hub:
    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of each repository."""
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files by their sha256."""
    tokens: set[str] = field(default_factory=set)
    """Tokens with which something was changed."""
    url: str = ""

    def environment(self, home: Path) -> dict[str, str]:
        """Environment of a process that knows only this Hub."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": "hf_of_a_test"}
        own |= {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        return {**own, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


@contextmanager
def fake_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _missing(self, what: str) -> None:
        self._answer({"error": what}, 404, X_Error_Code=what, X_Repo_Commit=_COMMIT)

    def do_POST(self) -> None:
        body, path = self._body(), self.path.partition("?")[0]
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        if path == "/api/repos/create":
            values = json.loads(body)
            name = f"{values['organization']}/{values['name']}" if values.get("organization") else values["name"]
            self.hub.repos.setdefault(name, {})
            self._answer({"url": f"{self.hub.url}/{name}", "name": name, "id": name})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif re.fullmatch(r"/api/models/.+/preupload/main", path):
            files = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular",
                    "shouldIgnore": False,
                }
                for f in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [
                {**one, "actions": {"upload": {"href": f"{self.hub.url}/objects/{one['oid']}"}}}
                for one in json.loads(body)["objects"]
            ]
            self._answer({"objects": objects, "transfer": "basic"})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(self.hub.repos[match[1]], body)
            self._answer({"success": True, "commitOid": _COMMIT, "commitUrl": f"{self.hub.url}/{match[1]}/commit/main"})
        else:
            self._missing("EntryNotFound")

    def do_PUT(self) -> None:
        body, name = self._body(), self.path.rpartition("/")[2]
        right = hashlib.sha256(body).hexdigest() == name
        if right:
            self.hub.objects[name] = body
        self._answer({}, 200 if right else 400)

    def _commit(self, files: dict[str, bytes], body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            held = self.hub.repos.get(match[1])
            if held is None:
                self._missing("RepoNotFound")
            else:
                siblings = [{"rfilename": name} for name in sorted(held)]
                self._answer({"id": match[1], "sha": _COMMIT, "siblings": siblings, "tags": [], "private": False})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in sorted(self.hub.repos.get(match[1], {}).items())
            ]
            self._answer(entries)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            content = self.hub.repos.get(match[1], {}).get(match[2])
            if content is None:
                self._missing("EntryNotFound")
            else:
                self._answer(content, X_Repo_Commit=_COMMIT, ETag=f'"{hashlib.sha256(content).hexdigest()}"')
        else:
            self._missing("EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET()
