#!/usr/bin/env python3
"""Attacks the server of the demo's model: `python3 attack.py PROGRAM`.

Sends huge and dripping requests, opens 1,000 connections, sends bodies that are no requests and pictures that are bombs, fills the
memory with bodies, lets pictures load slowly, and kills a client in the middle of a stream. After each attack the server must answer in
time, and its memory must stay below the limit. `--attacks strangers,slow` selects attacks. Needs no packages.
"""

import argparse
import base64
import http.server
import json
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zlib

KEY = "0123456789abcdef"
# Memory of the process beyond that of its start, MB: four pictures that are decoded at a time, and bodies.
MOST_MEMORY_MB = 5000
# Growth of the memory of the process that strangers may cause, and that may remain ten seconds after bodies are closed, MB.
MOST_GROWTH_MB = 100
PATIENCE = 60


class Server:
    def __init__(self, program, checkpoint):
        environment = {**os.environ, "OMNIGRPO_API_KEY": KEY, "HF_HUB_OFFLINE": "1"}
        command = [program, "serve", checkpoint, "--port", "0", "--allow_urls", "all"]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.url = self.process.stdout.readline().strip()
        self.address = ("127.0.0.1", int(re.search(r":(\d+)/", self.url)[1]))
        self.start_mb = self.memory_mb("VmRSS")

    def memory_mb(self, name):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1000

    def post(self, body, timeout=PATIENCE, path="chat/completions"):
        """Returns the status and the response."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", body, {"Authorization": f"Bearer {KEY}"})
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def connect(self):
        return socket.create_connection(self.address, timeout=PATIENCE)

    def head(self, length, key=f"Authorization: Bearer {KEY}\r\n"):
        return f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: {length}\r\n\r\n".encode()

    def fill(self, count, mib, key):
        """Sends `mib` MiB of a body of 64 on each of some connections, and returns the connections and the statuses that came."""
        held, statuses = [], []

        def send():
            stream = self.connect()
            held.append(stream)
            try:
                stream.sendall(self.head(64 << 20, key))
                for _ in range(mib):
                    stream.sendall(bytes(1 << 20))
            except OSError:
                pass  # It has been refused.
            stream.settimeout(0.5)
            try:
                statuses.append(stream.recv(100).split(b" ")[1].decode())
            except (OSError, IndexError):
                statuses.append("none")

        threads = [threading.Thread(target=send) for _ in range(count)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return held, {status: statuses.count(status) for status in sorted(set(statuses))}

    def metric(self, name):
        page = self.patiently(lambda: urllib.request.urlopen(self.url.replace("/v1", "/metrics"), timeout=PATIENCE).read().decode())
        return float(re.search(rf"^omnigrpo_serve_{re.escape(name)} (\S+)$", page, re.M)[1])

    def ask(self):
        """Returns the status and the response of a plain request; a server without room is an error of the system."""
        status, answer = self.post(asked("Hm?"))
        if status == 429:
            raise OSError(answer)
        return status, answer

    def patiently(self, ask):
        """Asks again while the server has no room."""
        start = time.perf_counter()
        while True:
            try:
                return ask()
            except OSError:
                if time.perf_counter() - start > PATIENCE:
                    raise
                time.sleep(0.2)

    def survives(self, attack):
        """Checks that the server answers, and reports how long it takes."""
        start = time.perf_counter()
        status, answer = self.patiently(self.ask)
        seconds = time.perf_counter() - start
        assert status == 200, (attack, status, answer)
        grown = self.memory_mb("VmHWM") - self.start_mb
        assert grown < MOST_MEMORY_MB, (attack, grown)
        print(f"  then: an answer in {seconds:.2f} s, peak memory +{grown:.0f} MB", flush=True)


def asked(content, **more):
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0, **more}


def picture(data):
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    return asked([{"type": "image_url", "image_url": {"url": address}}])


def png(width, height, rows):
    chunk = lambda kind, data: struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    packer, packed = zlib.compressobj(9), []
    for _ in range(rows):
        packed.append(packer.compress(bytes(1 + 3 * width)))
    packed.append(packer.flush())
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"".join(packed)) + chunk(b"IEND", b"")


def bodies(server):
    for length in ((64 << 20) + 1, 10**12, 10**30):
        with server.connect() as stream:
            stream.sendall(server.head(length))
            status = stream.recv(100).split(b"\r\n")[0].decode()
        print(f"a body of {length} bytes announced: {status}")
        assert " 413 " in status or " 400 " in status
    for name, body in [
        ("invalid UTF-8", b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}'),
        ("deep JSON", b'{"messages": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
        ("deep objects", b'{"tools": ' + b'{"a":' * 1_000_000 + b"1" + b"}" * 1_000_000 + b"}"),
        ("a million messages", json.dumps({"messages": [{"role": "user", "content": "x"}] * 1_000_000}).encode()),
        ("a text of 30 MB", json.dumps(asked("x " * 15_000_000)).encode()),
        ("a number of 10 MB", b'{"n": ' + b"9" * 10_000_000 + b"}"),
        ("a schema of 20 MB", json.dumps(asked("x", tools=[{"type": "function", "function": {"name": "n" * 20_000_000}}])).encode()),
        ("variables of 20 MB", json.dumps(asked("x", chat_template_kwargs={"a": "x" * 20_000_000})).encode()),
        ("a prompt of 30 MB", json.dumps({"prompt": "x " * 15_000_000}).encode()),
        ("ten million tokens", json.dumps({"prompt": [5] * 10_000_000}).encode()),
        ("a prompt without room", json.dumps({"prompt": [5] * 2048, "echo": True, "logprobs": 20, "n": 64, "max_tokens": 0}).encode()),
        ("deep prompts", b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"),
    ]:
        start = time.perf_counter()
        status, answer = server.post(body, path="completions" if b'"prompt"' in body[:20] else "chat/completions")
        print(f"{name}: {status} in {time.perf_counter() - start:.1f} s: {answer[:110]}")
        assert status == 400, answer


def growth(server, before):
    return server.memory_mb("VmRSS") - before


def is_returned(server, before):
    """Reports the memory ten seconds after bodies were closed."""
    time.sleep(10)
    grown = growth(server, before)
    print(f"  ten seconds after: {grown:+.0f} MB", flush=True)
    assert grown < MOST_GROWTH_MB, grown


def strangers(server):
    server.ask()
    before = server.memory_mb("VmRSS")
    held, statuses = server.fill(40, 60, key="")
    grown = growth(server, before)
    print(f"40 connections without the key, each with 60 MiB: {grown:+.0f} MB; answers {statuses}")
    assert grown < MOST_GROWTH_MB, grown
    assert "200" not in statuses and "503" not in statuses, statuses
    [stream.close() for stream in held]


def full(server):
    server.ask()
    before = server.memory_mb("VmRSS")
    held, statuses = server.fill(40, 60, key=f"Authorization: Bearer {KEY}\r\n")
    grown = growth(server, before)
    print(f"40 connections with the key, each with 60 MiB: {grown:+.0f} MB; answers {statuses}")
    assert grown < 1100 + MOST_GROWTH_MB and statuses.get("503", 0) >= 40 - 17, (grown, statuses)
    start = time.perf_counter()
    assert server.post(b"{}")[0] in (400, 503) and time.perf_counter() - start < 5
    [stream.close() for stream in held]
    is_returned(server, before)
    # Complete bodies, which are parsed and whose pictures are decoded.
    large = picture(png(12_000, 12_000, 12_000) + bytes(20_000_000))
    numbers = b'{"messages": [' + b"0," * 3_000_000 + b"0]}"
    threads = [threading.Thread(target=server.post, args=(body,)) for body in [large, numbers] * 4]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    print(f"8 large requests: peak +{server.memory_mb('VmHWM') - before:.0f} MB")
    is_returned(server, before)


class Slow(http.server.BaseHTTPRequestHandler):
    """A picture that never ends."""

    open = 0

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        Slow.open += 1
        try:
            while True:
                self.wfile.write(b"\x89")
                time.sleep(0.05)
        except OSError:
            Slow.open -= 1


def slow(server):
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{web.server_port}/x.png"
    body = json.dumps(asked([{"type": "image_url", "image_url": {"url": address}}])).encode()
    held = []
    for _ in range(8):
        stream = server.connect()
        stream.sendall(server.head(len(body)) + body)
        held.append(stream)
    while Slow.open < 4:
        time.sleep(0.01)

    def status(method, path, key, text=b""):
        start = time.perf_counter()
        with server.connect() as stream:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: {len(text)}\r\n\r\n"
            stream.sendall(head.encode() + text)
            return stream.recv(100).split(b" ")[1].decode(), time.perf_counter() - start

    key, chat = f"Authorization: Bearer {KEY}\r\n", "/v1/chat/completions"
    print("8 pictures load slowly; slowest and median answer of 20, ms:")
    for request, expected in [
        (("GET", "/health", ""), "200"),
        (("GET", "/metrics", ""), "200"),
        (("GET", "/v1/models", key), "200"),
        (("POST", chat, "", b"{}"), "401"),
        (("POST", chat, key, b"{}"), "400"),
    ]:
        answers = [status(*request) for _ in range(20)]
        seconds = sorted(second for _, second in answers)
        print(f"  {request[0]} {request[1]} {expected}: {1000 * seconds[-1]:.0f} {1000 * seconds[10]:.0f}")
        assert {code for code, _ in answers} == {expected}, answers
        assert seconds[18] < 0.1, seconds
    [stream.close() for stream in held]
    start = time.perf_counter()
    while Slow.open or server.metric("requests_waiting"):
        assert time.perf_counter() - start < 10, "pictures load on although their clients have left"
        time.sleep(0.02)
    print(f"  their clients leave: the last download ends after {time.perf_counter() - start:.2f} s")
    web.shutdown()


def pictures(server):
    half = png(12_000, 12_000, 12_000)
    for name, data in [
        ("a picture of 100,000 x 100,000 pixels", png(100_000, 100_000, 1)),
        ("a picture whose data end early", png(2000, 2000, 10)),
        ("a picture of 144 million black pixels", half),
        ("20 MB of zeros", b"\x89PNG\r\n\x1a\n" + bytes(20_000_000)),
        ("a text", b"hello"),
    ]:
        start = time.perf_counter()
        status, answer = server.post(picture(data))
        print(f"{name} ({len(data)} bytes): {status} in {time.perf_counter() - start:.1f} s: {answer[:110]}")
        assert status in (200, 400), answer


def loris(server):
    held = []
    for number in range(1000):
        stream = server.connect()
        # Every second one drips a head, the others a body.
        stream.sendall(b"GET / HTTP/1.1\r\nX: " if number % 2 else server.head(1000) + b"{")
        held.append(stream)
    print("1,000 connections with an incomplete head or body")
    start = time.perf_counter()
    server.survives("loris")
    assert time.perf_counter() - start < 5, "incomplete requests lock others out"
    for stream in held:
        stream.close()


def crowd(server):
    body = json.dumps(asked("Hm?", max_tokens=64, min_tokens=64, n=4)).encode()
    held = []
    for _ in range(400):
        stream = server.connect()
        try:
            stream.sendall(server.head(len(body)) + body)
        except ConnectionError:
            pass
        held.append(stream)
    print("400 requests at once, of which", int(server.metric("requests_running") + server.metric("requests_waiting")), "are accepted")
    for stream in held:
        stream.close()


def killed(server):
    body = json.dumps(asked("Hm?", max_tokens=2000, min_tokens=2000, n=8, stream=True)).encode()
    program = (
        "import socket, sys, time\n"
        f"stream = socket.create_connection({server.address!r})\n"
        "stream.sendall(sys.stdin.buffer.read())\n"
        "while True: stream.recv(1)\n"
    )
    client = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    client.stdin.write(server.head(len(body)) + body)
    client.stdin.close()
    start = time.perf_counter()
    while server.metric("completions_running") < 8:
        assert time.perf_counter() - start < PATIENCE
        time.sleep(0.05)
    client.kill()
    client.wait()
    start = time.perf_counter()
    while server.metric("completions_running") > 0:
        assert time.perf_counter() - start < PATIENCE
        time.sleep(0.05)
    print(f"a client killed in a stream: its 8 completions end after {time.perf_counter() - start:.2f} s")


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program", type=pathlib.Path)
    arguments.add_argument("--attacks", default=",".join(ATTACKS), help="names, separated by commas; the default is all")
    arguments = arguments.parse_args()
    program = arguments.program.resolve()
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([program, "demo", "--max_steps", "1", "--output_dir", "demo"], cwd=folder, check=True, **quiet)
        run(Server(program, pathlib.Path(folder) / "demo"), arguments.attacks.split(","))


ATTACKS = {attack.__name__: attack for attack in (strangers, full, slow, bodies, pictures, loris, crowd, killed)}


def run(server, names):
    try:
        for name in names:
            ATTACKS[name](server)
            server.survives(name)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
        print("SIGTERM: exit code 0")
    finally:
        server.process.kill()
        server.process.wait()


if __name__ == "__main__":
    main()
