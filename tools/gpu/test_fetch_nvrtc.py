"""Tests the exit codes of fetch_nvrtc: a missing network may skip a stage of the gate, a missing package must not."""

import http.server
import os
import pathlib
import socket
import subprocess
import tempfile
import threading
import unittest

FETCH = pathlib.Path(__file__).resolve().parent / "fetch_nvrtc"


class Index(http.server.BaseHTTPRequestHandler):
    """A package index that has pip alone."""

    def do_GET(self):
        found = self.path.startswith("/simple/pip")
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        if found:
            self.wfile.write(b'<a href="pip-25.0-py3-none-any.whl">pip-25.0-py3-none-any.whl</a>')

    def log_message(self, *_):
        pass


class FetchTest(unittest.TestCase):
    def code(self, port, *, present=False):
        """Runs the program with the index of a local port, and returns its exit code."""
        with tempfile.TemporaryDirectory() as folder:
            if present:
                lib = pathlib.Path(folder, "nvidia/cu13/lib")
                lib.mkdir(parents=True)
                (lib / "libnvrtc.so.13").touch()
            settings = {"PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple", "PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1"}
            others = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
            return subprocess.run([FETCH, folder], env={**others, **settings}, capture_output=True, check=False).returncode

    def test_an_index_without_the_package_is_a_failure(self):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        self.assertEqual(self.code(server.server_port), 1)

    def test_no_index_has_a_code_of_its_own(self):
        with socket.socket() as unused:
            # The port is bound, but nothing listens.
            unused.bind(("127.0.0.1", 0))
            port = unused.getsockname()[1]
            self.assertEqual(self.code(port), 75)
            self.assertEqual(self.code(port, present=True), 0)


if __name__ == "__main__":
    unittest.main()
