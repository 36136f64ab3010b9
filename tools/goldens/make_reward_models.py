"""Tiny reward models with tokenizers and templates, and the scores that transformers gives to texts made as TRL makes
them. Written to crates/scorers/tests/golden/reward_models; run by make_scorers.py.
"""

import json
import math
import shutil

import torch
from fixtures import CHECKPOINTS, EOT, IM_END, save_tensors, write_json
from make_scorers import GOLDEN, alphabet, bert_tokenizer, save_tokenizer, xlmr_tokenizer
from transformers import (
    AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertForSequenceClassification, LlamaConfig,
    LlamaForSequenceClassification, Qwen2Config, Qwen2ForSequenceClassification, Qwen3Config,
    Qwen3ForSequenceClassification, RobertaConfig, RobertaForSequenceClassification, RobertaTokenizer,
    XLMRobertaConfig, XLMRobertaForSequenceClassification,
)
from trl.data_utils import apply_chat_template, is_conversational

OUT = GOLDEN / "reward_models"

CHATML = (
    "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou judge.<|im_end|>\\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
)
# Qwen3's way: thinking is taken out of the answer and written again in a form of its own.
THINKING = (
    "{%- for m in messages %}"
    "{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}"
    "{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|im_end|>' }}{%- if not loop.last %}{{- '\\n' }}{%- endif %}{%- endfor %}"
)
# Ends with the end token, which stands for padding too: the score is that of the token before it.
CLOSED = "{{- bos_token }}{%- for m in messages %}{{- '[' + m.role + ']' + m.content | trim + eos_token }}{%- endfor %}"

DECODER = dict(
    vocab_size=320, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, rms_norm_eps=1e-6, id2label={"0": "LABEL_0"},
    label2id={"LABEL_0": 0},
)
ENCODER = dict(
    hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2, max_position_embeddings=96,
    id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0},
)

# A conversation and its completions per prompt; a text for TRL's plain prompts.
PROMPTS = [
    [dict(role="user", content="how many cubes?")],
    [
        dict(role="system", content="Be short."), dict(role="user", content="con mèo\n"),
        dict(role="assistant", content=" the answer "), dict(role="user", content="what is in the image?"),
    ],
    "The sky is",
]
COMPLETIONS = [
    ["three cubes", "<think>\none, two\n</think>\n\n<answer>2</answer>", "", "three cubes"],
    ["một con mèo", "cat and dog, dog and cat, cat and dog"],
    [" blue", " red, or so I think, at least in the evening"],
]


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("bias"):
                p.copy_(0.1 * noise)
            elif p.dim() == 1:
                p.copy_(1.0 + 0.2 * noise)
            elif "embed" in name:
                p.copy_(0.35 * noise)
            else:
                p.copy_(noise * (1.5 / math.sqrt(p.shape[1])))
    return model.eval()


def write(name, config_class, model_class, config, seed, dtype, tokenizer):
    directory = OUT / name
    fields = {k: v for k, v in config.items() if k != "model_type"}
    model = model_class._from_config(config_class(**fields), attn_implementation="eager", dtype=torch.float32)
    model = randomise(model, seed).to(dtype)
    save_tensors(directory / "model.safetensors", model.state_dict(), format="pt")
    write_json(directory / "config.json", config | {"architectures": [model_class.__name__]})
    tokenizer(directory)


def byte_level(template, **tokens):
    def files(directory):
        shutil.copy(CHECKPOINTS / "qwen2_vl_tied/tokenizer.json", directory / "tokenizer.json")
        config = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=512, **tokens)
        write_json(directory / "tokenizer_config.json", config)
        (directory / "chat_template.jinja").write_text(template)

    return files


def roberta_tokenizer():
    merges = [("c", "o"), ("co", "n"), ("Ġ", "m"), ("i", "n")]
    pieces = ["<s>", "<pad>", "</s>", "<unk>"] + alphabet() + ["".join(m) for m in merges] + ["<mask>"]
    return RobertaTokenizer(vocab={p: i for i, p in enumerate(pieces)}, merges=merges)


def text_of(prompt, completion, tokenizer, encoder):
    """TRL 1.16, GRPOTrainer._calculate_rewards; encoders without a template are asked about the last question."""
    if not is_conversational({"prompt": prompt}):
        return prompt + completion
    if encoder:
        return prompt[-1]["content"] + "\n" + completion
    messages = {"messages": prompt + [dict(role="assistant", content=completion)]}
    return apply_chat_template(messages, tokenizer)["text"]


def scores(directory, encoder):
    # num_labels=1 as TRL loads it.
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, attn_implementation="eager", dtype=torch.float32
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    out = []
    for prompt, completions in zip(PROMPTS, COMPLETIONS):
        texts = [text_of(prompt, completion, tokenizer, encoder) for completion in completions]
        inputs = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=encoder)
        with torch.no_grad():
            numbers = model(**inputs).logits[:, 0].tolist()
        ids = [[i for i, m in zip(*row) if m] for row in zip(inputs["input_ids"].tolist(), inputs["attention_mask"].tolist())]
        out.append(dict(texts=texts, ids=ids, scores=numbers))
    spread = [x for group in out for x in group["scores"]]
    assert max(spread) - min(spread) > 0.25, (directory.name, spread)
    print(directory.name, [round(x, 3) for x in spread])
    return out


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    f32, bf16 = torch.float32, torch.bfloat16
    chatml = byte_level(CHATML, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    write("qwen2", Qwen2Config, Qwen2ForSequenceClassification, dict(
        DECODER, model_type="qwen2", rope_theta=1e6, tie_word_embeddings=True, pad_token_id=EOT, eos_token_id=IM_END,
    ), 51, f32, chatml)
    thinking = byte_level(THINKING, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    write("qwen3", Qwen3Config, Qwen3ForSequenceClassification, dict(
        DECODER, model_type="qwen3", head_dim=8, rope_theta=1e6, tie_word_embeddings=False, pad_token_id=EOT,
        eos_token_id=IM_END,
    ), 52, bf16, thinking)
    closed = byte_level(CLOSED, bos_token="<|im_start|>", eos_token="<|endoftext|>")
    write("llama", LlamaConfig, LlamaForSequenceClassification, dict(
        DECODER, model_type="llama", rope_theta=5e5, tie_word_embeddings=False, bos_token_id=IM_END - 1, eos_token_id=EOT,
    ), 53, f32, closed)
    bert = bert_tokenizer()
    write("bert", BertConfig, BertForSequenceClassification, dict(
        ENCODER, model_type="bert", vocab_size=len(bert),
    ), 54, f32, lambda directory: save_tokenizer(directory, bert))
    roberta = roberta_tokenizer()
    write("roberta", RobertaConfig, RobertaForSequenceClassification, dict(
        ENCODER, model_type="roberta", vocab_size=len(roberta), type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1,
    ), 55, f32, lambda directory: save_tokenizer(directory, roberta))
    xlmr = xlmr_tokenizer()
    write("xlm-roberta", XLMRobertaConfig, XLMRobertaForSequenceClassification, dict(
        ENCODER, model_type="xlm-roberta", vocab_size=len(xlmr), type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1,
    ), 56, f32, lambda directory: save_tokenizer(directory, xlmr))
    goldens = dict(prompts=PROMPTS, completions=COMPLETIONS)
    for name in ("qwen2", "qwen3", "llama", "bert", "roberta", "xlm-roberta"):
        goldens[name] = scores(OUT / name, name in ("bert", "roberta", "xlm-roberta"))
    (OUT / "goldens.json").write_text(json.dumps(goldens, ensure_ascii=False) + "\n")
    for file in OUT.rglob("*"):
        if file.is_file():
            file.chmod(0o644)


if __name__ == "__main__":
    main()
