#!/usr/bin/env python3
"""Opens a hostile page in Chromium while a run trains: the run, its page and its metrics have to stand it.

    python3 tools/reliability/browser.py target/debug/omnigrpo
    python3 tools/reliability/browser.py target/release/omnigrpo --chromium /usr/bin/google-chrome --steps 400

The page comes from another origin of this machine. It sends bodies of up to 134 GB, forms, beacons, sockets and requests that it
wants to read, all without the token. The script fails unless the run ends with 0, at most 5 s after its last write and while the
browser still holds its connections, its memory stays bounded, nothing could be read, and its owner was answered meanwhile. Then
the same page visits `omnigrpo watch`. Only Linux, Chromium and Python's standard library are needed.
"""

import argparse
import http.server
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking".split()
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
MORE_MEMORY_KB = 96 << 10
LAST_SECS = 5

PAGE = """<!doctype html><title>hostile</title><body><script>
const ports = PORTS, told = [];
const limited = (promise) => Promise.race([promise, new Promise((_, no) => setTimeout(() => no('no answer in time'), 8000))]);
async function tried(name, work) {
  try { told.push([name, String(await limited(work()))]); } catch (error) { told.push([name, `failed: ${error}`]); }
}
(async () => {
  const small = new Blob([new Uint8Array(64 << 20)]);
  const bodies = { huge: new Blob(Array(2000).fill(small)), large: new Blob(Array(100).fill(small)), one: new Blob(['x']) };
  for (const port of ports) {
    const root = `http://127.0.0.1:${port}/`;
    for (const [name, body] of Object.entries(bodies)) {
      await tried(`${port} ${name}`, async () => (await fetch(root, { method: 'POST', mode: 'no-cors', body })).type);
    }
    for (let at = 0; at < 12; at += 1) fetch(root, { method: 'POST', mode: 'no-cors', body: bodies.huge }).catch(() => {});
    navigator.sendBeacon(root, 'x'.repeat(60000));
    for (const host of ['127.0.0.1', 'localhost']) {
      await tried(`${port} read ${host}`, async () => `READ ${await (await fetch(`http://${host}:${port}/metrics`)).text()}`);
    }
    await tried(`${port} put`, async () => `READ ${(await fetch(root, { method: 'PUT', body: 'x' })).status}`);
    await tried(`${port} events`, () => new Promise((yes) => {
      const events = new EventSource(`${root}api/events`);
      events.onmessage = () => yes('READ events');
      events.onerror = () => yes('refused');
    }));
    await tried(`${port} socket`, () => new Promise((yes) => {
      const socket = new WebSocket(`ws://127.0.0.1:${port}/`);
      socket.onopen = () => yes('READ socket');
      socket.onerror = () => yes('refused');
    }));
    const frame = document.body.appendChild(document.createElement('iframe'));
    frame.name = `frame${port}`;
    const form = document.body.appendChild(document.createElement('form'));
    Object.assign(form, { method: 'POST', action: root, target: frame.name, enctype: 'multipart/form-data' });
    form.appendChild(Object.assign(document.createElement('textarea'), { name: 'x', value: 'x'.repeat(1 << 20) }));
    form.submit();
  }
  await fetch('/told', { method: 'POST', body: JSON.stringify(told) });
})();
</script></body>"""


def hostile(ports):
    """A server of the page for these ports, and what the page tells."""
    told = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = PAGE.replace("PORTS", json.dumps(ports)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://localhost:{server.server_address[1]}/", told


def peak_kb(pid):
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1])


def visit(args, place, ports):
    """Opens the page for these ports; gives the browser, which is still open, when the page has told what it did."""
    address, told = hostile(ports)
    words = [args.chromium, *FLAGS, f"--user-data-dir={place / 'profile'}", "--remote-debugging-port=0", address]
    browser = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        done = told.get(timeout=args.patience)
    except queue.Empty:
        close(browser)
        sys.exit(f"the page told nothing within {args.patience} s")
    for name, what in done:
        print(f"  {name}: {what[:100]}")
    read = [name for name, what in done if "READ" in what]
    assert not read, f"the page of another origin could read: {read}"
    return browser


def close(browser):
    browser.terminate()
    try:
        browser.wait(10)
    except subprocess.TimeoutExpired:
        browser.kill()
        browser.wait()


def port_of(text):
    return int(re.search(r"http://127\.0\.0\.1:(\d+)/", text)[1])


def last_write(run):
    return max(path.stat().st_mtime for path in run.rglob("*") if path.is_file())


def trained(args, place):
    run = place / "run"
    words = [args.program, "demo", "--max_steps", args.steps, "--output_dir", run, "--dashboard", "--report_to", "prometheus", "--prometheus_port", 0]
    training = subprocess.Popen([str(word) for word in words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    said, addresses = [], {}

    def follow():
        for line in training.stderr:
            said.append(line)

    threading.Thread(target=follow, daemon=True).start()
    while not (run / "metrics.jsonl").exists() or len(addresses) < 2:
        assert training.poll() is None, "".join(said)
        time.sleep(0.1)
        for name, mark in [("page", "the run as a page: "), ("metrics", "for Prometheus: ")]:
            addresses |= {name: line.split(mark)[1].strip() for line in list(said) if mark in line}
    before = peak_kb(training.pid)
    browser = visit(args, place, [port_of(addresses["page"]), port_of(addresses["metrics"])])
    try:
        assert training.poll() is None, f"the run ended while it was attacked, with {training.poll()}; --steps gives it more time\n" + "".join(said[-5:])
        for address in addresses.values():
            assert DIRECT.open(address, timeout=20).status == 200, address
        after = peak_kb(training.pid)
        code = training.wait(args.patience + 600)
        end = time.time()
    finally:
        close(browser)
    assert code == 0, f"the run ended with {code}\n" + "".join(said[-5:])
    late = end - last_write(run)
    assert late <= LAST_SECS, f"the process ended {late:.1f} s after its last write"
    assert after <= before + MORE_MEMORY_KB, f"memory grew from {before} to {after} kB"
    print(f"the run ended with 0, {late:.1f} s after its last write; peak memory {before} kB before the page, {after} kB after it")


def watched(args, place):
    watching = subprocess.Popen([args.program, "watch", str(place / "run")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        address = watching.stdout.readline().strip()
        before = peak_kb(watching.pid)
        browser = visit(args, place, [port_of(address)])
        try:
            assert watching.poll() is None, f"`watch` ended with {watching.poll()}"
            assert DIRECT.open(address, timeout=20).status == 200
            after = peak_kb(watching.pid)
        finally:
            close(browser)
        assert after <= before + MORE_MEMORY_KB, f"memory grew from {before} to {after} kB"
        print(f"`watch` stands it; peak memory {before} kB before the page, {after} kB after it")
    finally:
        watching.terminate()
        watching.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "/usr/bin/chromium")
    parser.add_argument("--steps", type=int, default=300, help="steps of the run, which has to outlast the page")
    parser.add_argument("--patience", type=float, default=300, help="seconds for the page")
    args = parser.parse_args()
    args.program = os.path.abspath(args.program)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        trained(args, Path(place))
        watched(args, Path(place))


if __name__ == "__main__":
    main()
