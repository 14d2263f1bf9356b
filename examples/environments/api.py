"""Serve the facts of a file on loopback, for the environment `http`: `api.py FACTS.jsonl [--port 8300]`.

`GET /mayor/Lund` is answered with a name. The first line of the output is the address.
"""

from __future__ import annotations

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("facts", type=Path)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.facts.read_text().splitlines()]
    facts = {f"/{row['kind']}/{row['town']}": row["answer"] for row in rows}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections

        def do_GET(self) -> None:
            answer = facts.get(self.path)
            body = (answer or "not found").encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 -- the name of the base class
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", args.port), Handler) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
