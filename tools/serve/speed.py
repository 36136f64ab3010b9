#!/usr/bin/env python3
"""Measures a running server: `OMNIGRPO_API_KEY=KEY python3 speed.py http://127.0.0.1:8000/v1 --pid PID [--clients 1 4 16]`.

Each client streams one completion after another. A row has the tokens per second of all clients, the median and largest time to
the first token and between two tokens, in milliseconds, and the processor time of the server per token, which other programs of the
machine disturb least. Needs no packages.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import time
import urllib.request


def stream(url, tokens, prompt):
    """Returns the time of the request and of each token."""
    body = {
        "messages": [{"role": "user", "content": prompt}], "stream": True, "max_tokens": tokens, "min_tokens": tokens, "logprobs": True,
    }
    headers = {"Authorization": f"Bearer {os.environ['OMNIGRPO_API_KEY']}"}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
    times = [time.perf_counter()]
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            # Log-probabilities make an event for each token, also for one without text.
            if b'"logprob":' in line:
                times.append(time.perf_counter())
    return times


def processor_seconds(pid):
    """Returns the processor time that a process has taken."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("url")
    options.add_argument("--pid", type=int, required=True, help="process of the server")
    options.add_argument("--tokens", type=int, default=128)
    options.add_argument("--requests", type=int, default=2, help="requests of each client")
    options.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    given = options.parse_args()
    stream(given.url, 2, "warm")
    print("clients  tokens/s   first token ms (median, max)   between tokens ms (median, max)   processor ms/token")
    for clients in given.clients:
        prompts = [f"Tell me about {n}." for n in range(clients * given.requests)]
        start, before = time.perf_counter(), processor_seconds(given.pid)
        with concurrent.futures.ThreadPoolExecutor(clients) as pool:
            all_times = list(pool.map(lambda prompt: stream(given.url, given.tokens, prompt), prompts))
        seconds, processor = time.perf_counter() - start, processor_seconds(given.pid) - before
        first = [1000 * (times[1] - times[0]) for times in all_times]
        between = [1000 * (b - a) for times in all_times for a, b in zip(times[1:], times[2:])]
        tokens = sum(len(times) - 1 for times in all_times)
        print(
            f"{clients:7}  {tokens / seconds:8.1f}   {statistics.median(first):8.1f} {max(first):8.1f}"
            f"            {statistics.median(between):8.1f} {max(between):8.1f}             {1000 * processor / tokens:8.1f}"
        )


if __name__ == "__main__":
    main()
