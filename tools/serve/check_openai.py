#!/usr/bin/env python3
"""Asks a server through the package `openai`, as its users do: `python3 check_openai.py PROGRAM`.

It serves the model of the demo, and checks whole and streamed answers, pictures, several completions, log-probabilities, tools, errors,
concurrent requests, clients that leave, and texts to continue. Needs the packages `openai` and `pillow`.
"""

import base64
import concurrent.futures
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import openai
from PIL import Image, ImageDraw


def picture(colour):
    image = Image.new("RGB", (56, 56), "black")
    ImageDraw.Draw(image).rectangle((14, 14, 42, 42), fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def question(text, colour=None):
    content = [{"type": "text", "text": text}]
    if colour:
        content.insert(0, {"type": "image_url", "image_url": {"url": picture(colour)}})
    return [{"role": "user", "content": content}]


def check(client, model):
    create = client.chat.completions.create
    assert [one.id for one in client.models.list().data] == [model]
    assert client.models.retrieve(model).id == model

    answer = create(model=model, messages=question("Which colour is it?", "red"), temperature=0, max_tokens=16)
    text = answer.choices[0].message.content
    assert text and answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.choices[0].finish_reason in ("stop", "length")
    print("whole:   ", repr(text), answer.usage.completion_tokens, "tokens")

    stream = create(
        model=model, messages=question("Which colour is it?", "red"), temperature=0, max_tokens=16, stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage == answer.usage
    print("streamed:", len(chunks), "chunks")

    several = create(model=model, messages=question("Which colour?", "blue"), n=4, temperature=1, seed=1, logprobs=True, top_logprobs=3)
    again = create(model=model, messages=question("Which colour?", "blue"), n=4, temperature=1, seed=1, logprobs=True, top_logprobs=3)
    assert [c.message.content for c in several.choices] == [c.message.content for c in again.choices]
    places = several.choices[0].logprobs.content
    assert all(len(place.top_logprobs) == 3 and place.logprob <= 0 for place in places)
    assert b"".join(bytes(place.bytes) for place in places).decode() == several.choices[0].message.content

    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    described = create(model=model, messages=question("Hm?"), tools=tools, temperature=0, max_tokens=2)
    plain = create(model=model, messages=question("Hm?"), tools=tools, tool_choice="none", temperature=0, max_tokens=2)
    assert described.usage.prompt_tokens > plain.usage.prompt_tokens
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    conversation = question("Hm?") + [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "nothing"},
    ]
    create(model=model, messages=conversation, tools=tools, max_tokens=2)

    # The demo's template has no variables, so that these change nothing.
    variables = {"chat_template_kwargs": {"enable_thinking": False}, "skip_special_tokens": True}
    again = create(model=model, messages=question("Which colour is it?", "red"), temperature=0, max_tokens=16, extra_body=variables)
    assert again.choices[0].message.content == text

    continued = client.completions.create(model=model, prompt="What is", max_tokens=6, temperature=0, echo=True, logprobs=2)
    said = continued.choices[0]
    assert said.text.startswith("What is") and continued.usage.completion_tokens <= 6
    assert said.logprobs.token_logprobs[0] is None and all(nats <= 0 for nats in said.logprobs.token_logprobs[1:])
    assert "".join(said.logprobs.tokens[: continued.usage.prompt_tokens]) == "What is"
    scored = client.completions.create(model=model, prompt=said.text, max_tokens=0, echo=True, logprobs=1).choices[0]
    furthest = max(abs(a - b) for a, b in zip(scored.logprobs.token_logprobs[1:], said.logprobs.token_logprobs[1:]))
    assert scored.text == said.text and furthest < 1e-4, furthest
    parts = client.completions.create(model=model, prompt="What is", max_tokens=6, temperature=0, stream=True)
    assert "What is" + "".join(part.choices[0].text for part in parts) == said.text
    print("text:    ", repr(said.text))

    for error, wrong in [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"frequency_penalty": 1}),
        (openai.BadRequestError, {"response_format": {"type": "json_object"}}),
        (openai.BadRequestError, {"max_tokens": 10**8}),
        (openai.NotFoundError, {"model": "other"}),
    ]:
        try:
            create(**{"model": model, "messages": question("Hm?"), **wrong})
        except error as refused:
            assert refused.body["message"], refused
            print("refused: ", refused.body["message"])
        else:
            raise AssertionError(f"{wrong} was not refused")
    try:
        client.with_options(api_key="other").models.list()
    except openai.AuthenticationError:
        pass
    else:
        raise AssertionError("a wrong key was not refused")

    texts = [f"What is {n}?" for n in range(24)]
    ask = lambda text: create(model=model, messages=question(text), temperature=0, max_tokens=12).choices[0].message.content
    alone = [ask(text) for text in texts]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, texts)) == alone

    # A client that leaves in the middle of a stream.
    endless = create(model=model, messages=question("Hm?"), stream=True, max_tokens=400, extra_body={"min_tokens": 400})
    next(iter(endless))
    endless.close()
    running = 1
    while running:
        page = subprocess.check_output(["curl", "-s", str(client.base_url).replace("/v1/", "/metrics")], text=True)
        running = int(re.search(r"completions_running (\d+)", page)[1])
    assert 'outcome="disconnected"} 1' in page, page


def main():
    program = pathlib.Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder, "HF_HUB_OFFLINE": "1"}
        subprocess.run([program, "demo", "--max_steps", "1", "--output_dir", "demo"], cwd=folder, env=environment, check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        server = subprocess.Popen([program, "serve", "demo", "--port", "0"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            url, key = server.stdout.readline().strip(), server.stdout.readline().strip().removeprefix("key: ")
            check(openai.OpenAI(base_url=url, api_key=key, max_retries=0), "demo")
            server.send_signal(signal.SIGTERM)
            assert server.wait(60) == 0
        finally:
            server.kill()
            server.wait()
    print("done")


if __name__ == "__main__":
    main()
