"""A Hugging Face Hub on this machine, for the calls that huggingface_hub makes to download a model or dataset."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

from tests.time_limits import UNREACHED_SECONDS

GATED = "org/gated"


@dataclass
class FakeHub:
    """Repositories with their commits, models and datasets alike; `endpoint` serves them."""

    endpoint: str = ""
    commits: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    """(model, commit hash) -> content by file name."""
    branches: dict[tuple[str, str], str] = field(default_factory=dict)
    """(model, branch) -> commit hash."""
    downloaded: list[str] = field(default_factory=list)
    """Names of the files whose content was requested."""

    def commit(self, model: str, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit at the end of a branch and return its hash."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[model, sha] = files
        self.branches[model, branch] = sha
        return sha

    def sha(self, model: str, revision: str) -> str | None:
        """Return the commit hash of a branch or commit."""
        return revision if (model, revision) in self.commits else self.branches.get((model, revision))


@contextmanager
def serve_hub() -> Iterator[FakeHub]:
    """Serve an empty hub on a loopback port."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Be silent."""

        def do_GET(self) -> None:
            self.answer(body=True)

        def do_HEAD(self) -> None:
            self.answer(body=False)

        def answer(self, *, body: bool) -> None:
            status, headers, content = self.find(unquote(urlsplit(self.path).path).split("/")[1:], body=body)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if body:
                self.wfile.write(content)

        def find(self, path: list[str], *, body: bool) -> tuple[int, dict[str, str], bytes]:
            is_api = path[:1] == ["api"]
            if is_api or path[:1] == ["datasets"]:
                path = path[2 if is_api else 1 :]
            org, name, what, revision, *rest = [*path, "revision", "main"]
            model = f"{org}/{name}"
            if model == GATED:
                return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
            if all(known != model for known, _ in hub.branches):
                return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
            sha = hub.sha(model, revision)
            if sha is None:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
            files = hub.commits[model, sha]
            if what == "resolve":
                content = files["/".join(rest[:-2])]
                if body:
                    hub.downloaded.append("/".join(rest[:-2]))
                return 200, {"ETag": f'"{oid(content)}"', "X-Repo-Commit": sha}, content
            if what == "tree":
                tree = [{"type": "file", "path": f, "size": len(c), "oid": oid(c)} for f, c in files.items()]
                return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
            info = {"id": model, "sha": sha, "siblings": [{"rfilename": f} for f in files]}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_of_this_process(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[FakeHub]:
    """Serve an empty hub that huggingface_hub in this process uses; `cache`: its folder of downloaded files."""
    with serve_hub() as served:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, served.endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        for name in ("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"):
            monkeypatch.setattr(constants, name, UNREACHED_SECONDS)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        close_session()  # a client reads NO_PROXY when it is created
        yield served


def oid(content: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
