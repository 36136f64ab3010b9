"""Two tiny HumanOmni checkpoints and what an independent construction makes of them: SigLIP, Whisper, BERT and Qwen2 of
transformers, RegStage of timm, Conv3d and interpolate of torch. transformers has no class for the whole.

Weights are rounded to bfloat16 and stored so; everything is computed in float32.
"""

import math
import shutil
import struct

import numpy as np
import timm
import torch
import torch.nn.functional as F
from fixtures import (
    CHECKPOINTS, EOT, FRAMES, ID, IM_END, MEDIA, OUT, VOCAB, open_rgb, save_tensors, sketch, write_json,
)
from make_checkpoints import build_tokenizer, tokenizer_config
from PIL import Image
from timm.layers import LayerNorm2d
from timm.models.regnet import RegStage
from torch import nn
from transformers import (
    AutoTokenizer, BertConfig, BertModel, BertTokenizer, Qwen2Config, Qwen2ForCausalLM, SiglipVisionConfig,
    SiglipVisionModel, WhisperConfig, WhisperFeatureExtractor, WhisperModel,
)
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

CASES = OUT / "humanomni"
NAMES = ("humanomni", "humanomni_large")
# Chosen so that every greedy step of every case is decided clearly and no control token appears.
SEEDS = {"humanomni": 4, "humanomni_large": 1}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "which", "emotion", "is", "the", "most", "obvious", "?", "what", "color", "##s", "do", "you", "hear"]

CHAT_TEMPLATE = (
    "{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def sizes(name):
    """Side of a picture, patch, frames; the grid of the large one is odd, so that its branches meet at (n + 1) / 2."""
    return (32, 8, 4) if name == "humanomni" else (24, 8, 3)


def configs(name):
    side, patch, _ = sizes(name)
    vision = dict(
        model_type="siglip_vision_model", hidden_size=12, intermediate_size=20, num_hidden_layers=3,
        num_attention_heads=2, image_size=side, patch_size=patch, vision_use_head=name != "humanomni",
    )
    audio = dict(
        model_type="whisper", d_model=12, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=20,
        num_mel_bins=12, max_source_positions=20, activation_function="gelu", decoder_layers=1,
        decoder_attention_heads=2, decoder_ffn_dim=16, max_target_positions=4, vocab_size=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )
    text = dict(
        model_type="bert", hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=len(WORDS), max_position_embeddings=12, hidden_act="gelu", type_vocab_size=2, layer_norm_eps=1e-12,
        pad_token_id=0,
    )
    return vision, audio, text


def hub_config(name):
    small = name == "humanomni"
    return dict(
        architectures=["HumanOmniQwen2ForCausalLM"], model_type="HumanOmni_qwen2", attention_dropout=0.0,
        bos_token_id=EOT, eos_token_id=IM_END, hidden_act="silu", hidden_size=24, initializer_range=0.02,
        intermediate_size=40, max_position_embeddings=512, max_window_layers=2, num_attention_heads=4,
        num_hidden_layers=2, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1000000.0, sliding_window=32768,
        tie_word_embeddings=small, torch_dtype="bfloat16", use_cache=True, use_sliding_window=False, vocab_size=VOCAB,
        image_aspect_ratio="pad", mm_hidden_size=12, mm_projector_type="all_in_one_small" if small else "all_in_one",
        mm_audio_projector_type="mlp2x_gelu", mm_vision_select_layer=-2, mm_vision_select_feature="patch",
        mm_use_x_start_end=True, num_frames=sizes(name)[2], mm_vision_tower="siglip", mm_audio_tower="whisper",
        mm_text_tower="bert", mm_tunable_parts="mm_mlp_adapter,audio_projector,mm_language_model",
    )


def mlp(n, inner, out):
    return nn.Sequential(nn.Linear(n, inner), nn.GELU(), nn.Linear(inner, out))


class Branch(nn.Module):
    def __init__(self, c, h, depth, pad):
        super().__init__()
        stage = dict(depth=depth, out_chs=h, stride=1, dilation=1, act_layer=nn.SiLU, norm_layer=LayerNorm2d)
        self.s1 = RegStage(in_chs=c, **stage)
        self.sampler = nn.Sequential(nn.Conv3d(h, h, (2, 2, 2), (1, 2, 2), (1, pad, pad)), nn.SiLU())
        self.s2 = RegStage(in_chs=h, **stage)
        self.readout = mlp(h, h, h)

    def forward(self, x_tchw):
        x = self.sampler(self.s1(x_tchw).transpose(0, 1)[None])[0, :, :-1]
        x = self.s2(x.transpose(0, 1))
        return self.readout(x.permute(0, 2, 3, 1).flatten(0, 2))


class HumanOmni(nn.Module):
    def __init__(self, name):
        super().__init__()
        vision, audio, text = configs(name)
        raw = hub_config(name)
        small = name == "humanomni"
        c, h = 12, raw["hidden_size"]
        eager = dict(attn_implementation="eager", dtype=torch.float32)
        skip = ("architectures", "model_type", "torch_dtype", "image_aspect_ratio", "num_frames")
        llm = {k: v for k, v in raw.items() if k not in skip and not k.startswith("mm_")}
        self.llm = Qwen2ForCausalLM._from_config(Qwen2Config(**llm), **eager)
        self.vision = SiglipVisionModel._from_config(SiglipVisionConfig(**vision), **eager)
        self.audio = WhisperModel._from_config(WhisperConfig(**audio), **eager)
        self.text = BertModel._from_config(BertConfig(**text), **eager)
        self.video, self.body = (Branch(c, h, 2 if small else 4, 0 if small else 1) for _ in range(2))
        self.face = mlp(c, h, h)
        self.gate = mlp(8, 3584, 3)
        self.sound = mlp(c, h, h)

    def published(self):
        """Published name -> parameter."""
        out = {}
        for n, p in self.named_parameters():
            part, _, rest = n.partition(".")
            if part == "llm":
                out[rest] = p
            elif part == "vision":
                out["model.vision_tower.vision_tower.vision_model." + rest.removeprefix("vision_model.")] = p
            elif part == "audio" and rest.startswith("encoder."):
                out["model.audio_tower.audio_tower." + rest] = p
            elif part == "text":
                out["model.bert_model." + rest] = p
            elif part in ("video", "body"):
                step, _, rest = rest.partition(".")
                out[f"model.mm_projector.{step}_{part}.{rest}"] = p
            elif part in ("face", "gate", "sound"):
                stem = dict(face="mm_projector.mlp_2xgelu_face", gate="bert_gate", sound="audio_projector")[part]
                out[f"model.{stem}.{rest}"] = p
        return out

    def pictures(self, pixels, bert_ids, compress=False):
        states = self.vision(pixels, output_hidden_states=True).hidden_states[-2]
        t, n, c = states.shape
        side = math.isqrt(n)
        x = states.transpose(1, 2).reshape(t, c, side, side)
        face = self.face(states).transpose(1, 2).reshape(t, -1, side, side)
        face = F.interpolate(face, size=(math.ceil(side / 2),) * 2, mode="bilinear")
        face = face.permute(0, 2, 3, 1).flatten(0, 2)
        row = self.text(input_ids=torch.tensor([bert_ids])).last_hidden_state[:, 0]
        p = self.gate(row).softmax(1)[0]
        out = p[0] * self.video(x) + p[1] * self.body(x) + p[2] * face
        if compress:
            o = math.ceil(side / 2)
            grid = out.view(t, o, o, -1)
            fast = F.avg_pool2d(grid.permute(0, 3, 1, 2), 2, 2).permute(0, 2, 3, 1).flatten(0, 2)
            index = torch.arange(1, t, 4) if t > 1 else torch.tensor([0])
            out = torch.cat([fast, grid[index].flatten(0, 2)])
        return out

    def hearing(self, mel):
        rows = self.audio.encoder(mel[None]).last_hidden_state
        rows = F.avg_pool1d(rows.transpose(1, 2), 3, 3).transpose(1, 2)[0]
        return self.sound(rows)

    def embeds(self, chunks, media):
        rows = [self.llm.model.embed_tokens(torch.tensor(chunks[0], dtype=torch.long))]
        for feature, chunk in zip(media, chunks[1:]):
            rows += [feature, self.llm.model.embed_tokens(torch.tensor(chunk, dtype=torch.long))]
        return torch.cat(rows)


def new_model(name):
    torch.manual_seed(0)
    model = HumanOmni(name).eval().requires_grad_(True)
    generator = torch.Generator().manual_seed(SEEDS[name])
    with torch.no_grad():
        for n, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if n.endswith("bias"):
                value = 0.1 * noise
            elif p.dim() < 2:
                value = 1.0 + 0.2 * noise
            elif "embed" in n and "patch" not in n or "lm_head" in n:
                value = 0.4 * noise
            else:
                strong = n.startswith("llm") and n.endswith(("o_proj.weight", "down_proj.weight"))
                value = noise * ((2.5 if strong else 1.2) / math.sqrt(p[0].numel()))
            p.copy_(value.bfloat16().float())
    return model


def write_checkpoint(name):
    directory = CHECKPOINTS / name
    shutil.rmtree(directory, ignore_errors=True)
    model = new_model(name)
    vision, audio, text = configs(name)
    named = {n: p.detach().bfloat16() for n, p in model.published().items()}
    if name == "humanomni":
        # Everything in one file, the head of a tied model left out.
        main = named
    else:
        # Towers in directories of their own, with the names of the hub.
        prefixes = {"siglip": "model.vision_tower.vision_tower.", "whisper": "model.audio_tower.audio_tower."}
        main = {n: p for n, p in named.items() if not n.startswith(tuple(prefixes.values()))}
        for tower, prefix in prefixes.items():
            own = {n.removeprefix(prefix): p for n, p in named.items() if n.startswith(prefix)}
            if tower == "whisper":
                own = {"model." + n: p for n, p in own.items()}
            save_tensors(directory / tower / "model.safetensors", own, format="pt")
    save_tensors(directory / "model.safetensors", main, format="pt")
    write_json(directory / "config.json", hub_config(name))
    write_json(directory / "siglip/config.json", vision)
    write_json(directory / "whisper/config.json", audio)
    write_json(directory / "bert/config.json", text)
    write_json(directory / "siglip/preprocessor_config.json", dict(
        do_resize=True, do_rescale=True, do_normalize=True, image_processor_type="SiglipImageProcessor",
        image_mean=[0.5] * 3, image_std=[0.5] * 3, resample=3, rescale_factor=1 / 255,
        size=dict(height=vision["image_size"], width=vision["image_size"]),
    ))
    write_json(directory / "whisper/preprocessor_config.json", dict(
        feature_extractor_type="WhisperFeatureExtractor", feature_size=12, sampling_rate=16000, hop_length=400,
        chunk_length=1, n_fft=400, padding_side="right", padding_value=0.0, return_attention_mask=False,
    ))
    (directory / "bert/vocab.txt").write_text("\n".join(WORDS) + "\n")
    write_json(directory / "bert/tokenizer_config.json", dict(do_lower_case=True, tokenizer_class="BertTokenizer"))
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    write_json(directory / "tokenizer_config.json", {**tokenizer_config(False), "chat_template": CHAT_TEMPLATE})
    write_json(directory / "generation_config.json", dict(
        bos_token_id=EOT, pad_token_id=EOT, eos_token_id=[IM_END, EOT], do_sample=True, temperature=0.01,
    ))
    return model


def make_sound():
    """0.6 s of a rising tone, 16 bit, 16 kHz, mono."""
    t = np.arange(9600) / 16000
    samples = (0.4 * np.sin(2 * np.pi * (200 + 900 * t) * t) * np.hanning(9600) * 32767).astype("<i2").tobytes()
    header = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(samples), b"WAVE", b"fmt ", 16, 1, 1, 16000, 32000, 2, 16, b"data", len(samples))
    (MEDIA / "rise.wav").write_bytes(header + samples)


def square(picture):
    side = max(picture.size)
    out = Image.new("RGB", (side, side), (127, 127, 127))
    out.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return out


def pixels_of(paths, side):
    processor = SiglipImageProcessorPil(size=dict(height=side, width=side))
    pictures = [square(open_rgb(MEDIA / p)) for p in paths]
    return processor(images=pictures, return_tensors="pt")["pixel_values"]


def mel_of(path):
    samples = np.frombuffer((MEDIA / path).read_bytes()[44:], "<i2").astype(np.float32) / 32768
    extractor = WhisperFeatureExtractor(feature_size=12, hop_length=400, chunk_length=1, n_fft=400)
    return extractor(samples, sampling_rate=16000, return_tensors="pt")["input_features"][0]


def middles(total, n):
    share = (total - 1) / n
    return np.round(np.array([(share * i + share * (i + 1)) / 2 for i in range(n)]) + 1e-6).astype(int)


# case -> (user text with placeholders, media in order)
QUESTION = "Which emotion is the most obvious?"
CASE = {
    "va": (f"<video>\n<audio>\n{QUESTION}", ["video", "audio"]),
    "v": ("<video>\nWhat colors do you see? What do you see? What colors? What?", ["video"]),
    "a": ("<audio>\nWhat do you hear?", ["audio"]),
    "i": ("<image>\nWhat colors?", ["image"]),
    "t": ("What is the most obvious emotion?", []),
}
MARKERS = {"image": ("<im_start>", "<im_end>"), "video": ("<vi_start>", "<vi_end>"), "audio": ("<au_start>", "<au_end>")}


def chunks_of(directory, text, kinds):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
    for kind, (a, b) in MARKERS.items():
        prompt = prompt.replace(f"<{kind}>", f"{a}<{kind}>{b}")
    chunks = []
    for kind in kinds:
        chunk, prompt = prompt.split(f"<{kind}>")
        chunks.append(chunk)
    return [tokenizer(c, add_special_tokens=False).input_ids for c in chunks + [prompt]]


def run_case(name, model, case):
    directory = CHECKPOINTS / name
    side, _, num_frames = sizes(name)
    text, kinds = CASE[case]
    chunks = chunks_of(directory, text, kinds)
    question = text
    for kind in kinds:
        question = question.replace(f"<{kind}>", "")
    bert = BertTokenizer(str(directory / "bert/vocab.txt"))
    bert_ids = bert(question.strip(), truncation=True, max_length=12)["input_ids"]
    inputs = {
        "image": lambda: pixels_of(["shapes.png"], side),
        "video": lambda: pixels_of([FRAMES[i] for i in middles(8, num_frames)], side),
        "audio": lambda: mel_of("rise.wav"),
    }
    data = {kind: inputs[kind]() for kind in kinds}
    features = [model.hearing(data[k]) if k == "audio" else model.pictures(data[k], bert_ids) for k in kinds]
    generator = torch.Generator().manual_seed(len(case) + sum(map(ord, case)))
    completion = torch.randint(0, 256, (8,), generator=generator).tolist()
    completion[-1] = IM_END
    coefficients = torch.randn(8, generator=generator)
    prefix = model.embeds(chunks, features)
    start = prefix.shape[0] - 1

    def logits_of(tail):
        rows = torch.cat([prefix, model.llm.model.embed_tokens(torch.tensor(tail, dtype=torch.long))])
        return model.llm(inputs_embeds=rows[None]).logits[0]

    logits = logits_of(completion)[start:-1]
    logp = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
    loss = (coefficients * logp).sum()
    model.zero_grad(set_to_none=True)
    loss.backward()
    greedy = []
    with torch.no_grad():
        for _ in range(12):
            best = logits_of(greedy)[-1].topk(2)
            margin = float(best.values[0] - best.values[1])
            assert margin > 1e-3, (name, case, margin)
            greedy.append(int(best.indices[0]))
    assert max(greedy) < 296, (name, case, greedy)
    out = {
        "chunk_ids": torch.tensor(sum(chunks, [])), "chunk_lengths": torch.tensor([len(c) for c in chunks]),
        "feature_lengths": torch.tensor([f.shape[0] for f in features], dtype=torch.long),
        "bert_ids": torch.tensor(bert_ids), "completion_ids": torch.tensor(completion), "coefficients": coefficients,
        "logits": logits, "logp": logp, "loss": loss.reshape(1), "greedy": torch.tensor(greedy),
    }
    for i, f in enumerate(features):
        out[f"features.{i}"] = f
    for kind, x in data.items():
        if kind == "audio":
            out["mel"] = x
        else:
            levels = ((x * 0.5 + 0.5) * 255).round()
            out[f"{kind}_u8"] = levels.to(torch.uint8)
    for key, p in model.published().items():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all(), key
            out[f"sketch.{key}"] = sketch(p.grad)
    if case == "v":
        with torch.no_grad():
            out["compressed"] = model.pictures(data["video"], bert_ids, compress=True)
    print(name, case, prefix.shape[0], float(loss.detach()), greedy)
    save_tensors(CASES / f"{case}.{name}.safetensors", out)


def main():
    assert timm.__version__ == "1.0.31", timm.__version__
    make_sound()
    for name in NAMES:
        model = write_checkpoint(name)
        for case in CASE if name == "humanomni" else ("va", "i"):
            run_case(name, model, case)


if __name__ == "__main__":
    main()
