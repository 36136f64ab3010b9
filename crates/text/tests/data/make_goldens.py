"""Writes the golden files of this folder with `transformers` and `tokenizers`.

    python make_goldens.py                      tiny tokenizer, templates and their goldens
    python make_goldens.py --qwen DIR           goldens of a published Qwen tokenizer.json in DIR
    python make_goldens.py --published DIR      goldens of texts and tools with published templates, *.jinja in DIR (TRL's
                                                chat_templates) or here (smollm2.jinja, Apache 2.0, of SmolLM2-135M-Instruct)

The tiny tokenizer is a byte-level BPE with Qwen's pre-tokeniser and control tokens, trained on the lines below.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import tokenizers
from PIL import Image
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast, Qwen2VLImageProcessorPil, Qwen2VLProcessor, Qwen2VLVideoProcessor

HERE = Path(__file__).parent
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
           "<|image_pad|>", "<|video_pad|>"]
WORDS = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<think>", "</think>"]
CORPUS = [
    "system user assistant\n\n\n\n You are a helpful assistant. What is shown in the image? How many cubes are there?",
    "the thinking process in <think> </think> and final answer in <answer> </answer> tags. The answer is 42.\n",
    "Trong hình có bao nhiêu con mèo? Câu trả lời là hai con. 图中有什么？ 动作识别 答案是",
    "Output Picture 1: Video 2: <|im_start|> <|im_end|> the the the image video question answer options A B C D",
]

# The structure of the templates published with Qwen2-VL, in other words.
QWEN_STYLE = (
    "{% set pictures = namespace(value=0) %}{% set clips = namespace(value=0) %}"
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}<|im_end|>\n{% else %}"
    "{% for item in message['content'] %}"
    "{% if 'image' in item or 'image_url' in item or item['type'] == 'image' %}"
    "{% set pictures.value = pictures.value + 1 %}"
    "{% if add_vision_id %}Picture {{ pictures.value }}: {% endif %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'video' in item or item['type'] == 'video' %}"
    "{% set clips.value = clips.value + 1 %}"
    "{% if add_vision_id %}Video {{ clips.value }}: {% endif %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in item %}{{ item['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A text-only template that trims, in the layout of many published ones.
TRIMMING = """{{- eos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
<|im_start|>system
{{ message.content | trim }}<|im_end|>
    {% else %}
        {%- set body = '<|im_start|>' + message['role'] + '\\n' + message['content'].strip() %}
        {{- body + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEMPLATES = {"qwen_style": QWEN_STYLE, "trimming": TRIMMING}

# Templates that write tools, in the structure of published ones. Text and parts of a message:
SAY = (
    "{% macro say(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "{% if item.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ item.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
LIST = "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
# Qwen2.5 and Qwen3-VL: calls as JSON; the answers of tools share a user turn.
JSON_CALLS = SAY + (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ say(messages[0].content) }}\n\n{% endif %}"
    "Tools:" + LIST + "<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ say(messages[0].content) }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'user' %}<|im_start|>user\n{{ say(message.content) }}<|im_end|>\n"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n{{ say(message.content) }}"
    "{% for call in message.tool_calls or [] %}{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    "<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": {{ call.function.arguments | tojson }}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% elif message.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ say(message.content) }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Hermes: calls as JSON; every answer is a turn of its own role.
HERMES = (
    "{% if tools %}<|im_start|>system\nTools:" + LIST + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>tool\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n{\"name\": \"{{ call.function.name }}\", \"arguments\": "
    "{{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3.5: calls as tags; texts are trimmed; the thinking of earlier turns is left out.
TAGGED_CALLS = SAY + (
    "{% if tools %}<|im_start|>system\nTools:" + LIST + "{% if messages[0].role == 'system' %}\n\n{{ say(messages[0].content) | trim }}"
    "{% endif %}<|im_end|>\n{% endif %}"
    "{% set last = namespace(user=0) %}{% for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = say(message.content) | trim %}"
    "{% if message.role == 'user' %}<|im_start|>user\n{{ content }}<|im_end|>\n"
    "{% elif message.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > last.user %}<think>\n\n</think>\n\n{% endif %}"
    "{{ content.split('</think>')[-1].lstrip('\n') }}"
    "{% for call in message.tool_calls or [] %}{% if not loop.first %}{{ '\n' }}{% elif content %}{{ '\n\n' }}{% endif %}"
    "<tool_call>\n<function={{ call.function.name }}>\n{% for name, value in call.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif message.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n' }}<tool_response>\n{{ content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)
TOOL_TEMPLATES = {"json_calls": JSON_CALLS, "hermes": HERMES, "tagged_calls": TAGGED_CALLS}
PUBLISHED = ["qwen2_5", "qwen3", "qwen3_vl", "qwen3_5_nothink", "qwen3_5_think"]

TEXTS = [
    "", " ", "\n", "What is shown?", " leading", "trailing ", "\n\nWhat\n\n\n", "a  b   c\t\td", "42 cats' tails, they're",
    "Trong hình có bao nhiêu con mèo?", "图中有什么？", "e\u0301 decomposed \u1e9b\u0323", "😀👩‍👩‍👧 emoji", "\r\n\r\n  x",
    "<think> reason </think><answer>A</answer>", "x" * 70, "a\u00a0b\u3000c",
]
CONTROL_TEXTS = [
    "<|im_start|>user\nhi<|im_end|>\n", "<|im_end|><|im_end|> <|endoftext|>", "a<|image_pad|>b", "<|im_start", "<|fim_prefix|>x",
]


def tiny_tokenizer():
    tok = tokenizers.Tokenizer(BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=520, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tok.train_from_iterator(CORPUS * 4, trainer)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in WORDS])
    return tok


def text(t):
    return {"type": "text", "text": t}


IMAGE, VIDEO = {"type": "image"}, {"type": "video"}

CONVERSATIONS = [
    dict(name="text", messages=[("user", [text("What is 6 x 7?")])]),
    dict(name="image", messages=[("user", [IMAGE, text("What is shown in the image?")])]),
    dict(name="newline after image", messages=[("user", [IMAGE, text("\nHow many cubes?\n\n")])]),
    dict(name="two images, spaces", messages=[("user", [text("  first "), IMAGE, text(" second "), IMAGE, text(" equal? ")])]),
    dict(name="video", messages=[("user", [VIDEO, text("动作识别")])]),
    dict(name="video between images, numbered", add_vision_id=True,
         messages=[("user", [IMAGE, VIDEO, IMAGE, text("Options A B")])]),
    dict(name="system", messages=[("system", [text("Reply in <think> </think>.")]), ("user", [IMAGE, text("Hi")])]),
    dict(name="turns", messages=[("user", [text("\n hi")]), ("assistant", [text("Hello.")]), ("user", [IMAGE, text("and?")])]),
    dict(name="answered", completed=True, messages=[("user", [IMAGE, text("how many?")]), ("assistant", [text("<answer>42</answer>")])]),
]
TRIMMED_CONVERSATIONS = [
    dict(name="trimmed", messages=[("system", " Be brief.\n"), ("user", "\n What is\n\n shown? ")]),
    dict(name="trimmed turns", messages=[("user", "  hi"), ("assistant", "\n\n Hello.  "), ("user", "bye")]),
    dict(name="trimmed answer", completed=True, messages=[("user", "hi"), ("assistant", "\nHello. ")]),
]
FRAME = (84, 56)  # width, height: 4 x 6 patches, 6 positions after merging


def rendered(processor, conversation, template):
    """Text and ids as the Qwen2-VL processor makes them, with the positions per medium."""
    messages = [{"role": role, "content": content} for role, content in conversation["messages"]]
    kwargs = {"add_vision_id": True} if conversation.get("add_vision_id") else {}
    completed = conversation.get("completed", False)
    string = processor.tokenizer.apply_chat_template(
        messages, chat_template=template, add_generation_prompt=not completed, tokenize=False, **kwargs)
    parts = [p["type"] for m in messages if not isinstance(m["content"], str) for p in m["content"]]
    images = [Image.new("RGB", FRAME) for p in parts if p == "image"]
    videos = [np.zeros((4, FRAME[1], FRAME[0], 3), np.uint8) for p in parts if p == "video"]
    out = processor(text=[string], images=images or None, videos=videos or None, do_sample_frames=False)
    grids = {"image": list(out.get("image_grid_thw", [])), "video": list(out.get("video_grid_thw", []))}
    counts = {kind: [int(np.prod(np.asarray(g))) // 4 for g in grid] for kind, grid in grids.items()}
    return dict(name=conversation["name"], completed=completed, add_vision_id=bool(kwargs), messages=messages,
                counts=counts, text=string, ids=[int(i) for i in out["input_ids"][0]])


ZOOM = {"type": "function", "function": {"name": "zoom", "description": "Shows a part.", "parameters": {
    "type": "object", "properties": {"bbox_2d": {"type": "array", "items": {"type": "number"}}, "label": {"type": "string"}},
    "required": ["bbox_2d"]}}}


def call(**arguments):
    return {"type": "function", "function": {"name": "zoom", "arguments": arguments}}


def tool_conversations(parts):
    """Conversations with tools; `parts` writes a text as the template reads it, and media as parts."""
    system, ask = {"role": "system", "content": parts("Be brief.")}, {"role": "user", "content": parts("Which digit is on the sign?")}
    look = {"role": "assistant", "content": "", "tool_calls": [call(bbox_2d=[1, 2.5, 30, 40], label="a \"sign\"")]}
    both = {"role": "assistant", "content": parts("I look twice."), "tool_calls": [call(bbox_2d=[1, 2, 3, 4]), call(bbox_2d=[5, 6, 7, 8])]}
    answer = {"role": "assistant", "content": parts("<answer>7</answer>")}
    tool = lambda content: {"role": "tool", "content": content}
    yield "one call", [system, ask, look, tool(parts("too dark"))]
    yield "an answer", [system, ask, look, tool(parts("7?")), answer]
    yield "two calls", [system, ask, both, tool(parts("first")), tool(parts("second"))]
    yield "a question after it", [system, ask, look, tool(parts("7?")), answer, {"role": "user", "content": parts("Sure?")}]
    if not isinstance(parts(""), str):
        yield "a picture", [system, ask, look, tool([IMAGE, text("the part")])]


def tool_goldens(templates):
    tok = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tiny" / "tokenizer.json"), eos_token="<|im_end|>")
    out = []
    for name, template in templates.items():
        plain = name in ("hermes", "qwen2_5", "qwen3")
        for case, messages in tool_conversations((lambda t: t) if plain else (lambda t: [text(t)])):
            string = tok.apply_chat_template(messages, tools=[ZOOM], chat_template=template, tokenize=False,
                                             add_generation_prompt=messages[-1]["role"] != "assistant")
            out.append(dict(template=name, name=case, messages=messages, text=string))
    return dict(tools=[ZOOM], cases=out)


TEXT_TEMPLATES = ["qwen2_5", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "llama3", "llama3_1", "smollm2"]


def text_goldens(folder):
    """Conversations of texts, with and without a system turn, thinking and tools."""
    tok = PreTrainedTokenizerFast(tokenizer_file=str(HERE / "tiny" / "tokenizer.json"), bos_token="<|endoftext|>", eos_token="<|im_end|>")
    say = lambda role, content: {"role": role, "content": content}
    ask, thought = say("user", "  What is 6 x 7?\n"), say("assistant", "<think>\nSix times seven.\n</think>\n\n42")
    conversations = {
        "a question": [ask], "a system turn": [say("system", "Be brief. "), ask],
        "turns": [ask, say("assistant", "42"), say("user", "Sure?")],
        "turns with thinking": [ask, thought, say("user", "Sure?")],
    }
    out = []
    for name in TEXT_TEMPLATES:
        own = HERE / f"{name}.jinja"
        template = (own if own.exists() else folder / f"{name}.jinja").read_text()
        for case, messages in conversations.items():
            thinks = [{"enable_thinking": True}, {"enable_thinking": False}] if name.startswith("qwen3") else []
            for kwargs in [{}, *thinks]:
                for tools in [[], [ZOOM]] if "{%- if tools" in template or "tools_in_user" in template else [[]]:
                    string = tok.apply_chat_template(messages, tools=tools or None, chat_template=template, tokenize=False,
                                                     add_generation_prompt=True, **kwargs)
                    out.append(dict(template=name, name=case, kwargs=kwargs, with_tools=bool(tools), messages=messages, text=string))
    return dict(tools=[ZOOM], cases=out)


def goldens(tokenizer_dir, templates):
    tok = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_dir / "tokenizer.json"), eos_token="<|im_end|>", pad_token="<|endoftext|>")
    limits = dict(min_pixels=28 * 28, max_pixels=1 << 20)
    processor = Qwen2VLProcessor(image_processor=Qwen2VLImageProcessorPil(**limits), tokenizer=tok,
                                 video_processor=Qwen2VLVideoProcessor(**limits))
    encode = lambda t, **k: tok(t, add_special_tokens=False, **k)["input_ids"]
    texts = []
    for t in TEXTS + CONTROL_TEXTS:
        ids = encode(t)
        texts.append(dict(text=t, harmless=t in TEXTS, ids=ids, decoded=tok.decode(ids),
                          decoded_skip=tok.decode(ids, skip_special_tokens=True)))
    cases = [(name, c) for name in templates for c in (TRIMMED_CONVERSATIONS if name == "trimming" else CONVERSATIONS)]
    return dict(texts=texts, prompts=[dict(template=name, **rendered(processor, c, TEMPLATES[name])) for name, c in cases])


def dump(path, value):
    path.write_text(json.dumps(value, ensure_ascii=False, indent=None, separators=(",", ":")).replace('},{"', '},\n{"') + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--qwen", type=Path)
    parser.add_argument("--published", type=Path)
    args = parser.parse_args()
    if args.published:
        templates = {name: (args.published / f"{name}.jinja").read_text() for name in PUBLISHED}
        dump(HERE / "published_tool_goldens.json", tool_goldens(templates))
        dump(HERE / "published_text_goldens.json", text_goldens(args.published))
    elif args.qwen:
        dump(HERE / "qwen_goldens.json", goldens(args.qwen, TEMPLATES))
    else:
        tiny = json.loads(tiny_tokenizer().to_str())
        (HERE / "tiny").mkdir(exist_ok=True)
        dump(HERE / "tiny" / "tokenizer.json", tiny)
        dump(HERE / "tiny" / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})
        for name, template in {**TEMPLATES, **TOOL_TEMPLATES}.items():
            (HERE / f"{name}.jinja").write_text(template)
        dump(HERE / "tiny_goldens.json", goldens(HERE / "tiny", TEMPLATES))
        dump(HERE / "tool_goldens.json", tool_goldens(TOOL_TEMPLATES))
