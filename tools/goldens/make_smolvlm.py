"""SmolVLM2 and SmolVLM v1 (Idefics3): checkpoints, cases, three AdamW steps, rules of tiles and frames. The rows of the cases are
read by the tests as they stand, so prompts and pixels are compared from the file on.

Pictures and frames come from the processor that resizes with Pillow. The video processor of transformers takes another filter
than LANCZOS with torchvision below 0.27 and on CUDA.
"""

import copy
import math
import re
import shutil
import tempfile

import fixtures
import numpy as np
import torch
from fixtures import FRAMES, MEDIA, OUT, greedy, is_loud, open_rgb, randomise, row_of, save_tensors, sketch, write_json
from make_checkpoints import CORPUS, byte_level_bpe
from make_internvl import number, three_steps
from make_replay import ROWS
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    PreTrainedTokenizerFast,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
    SmolVLMProcessor,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import DEFAULT_CHAT_TEMPLATE
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
from transformers.video_utils import VideoMetadata

ROOT = OUT / "smolvlm"
GREEDY_TOKENS = 12
NUM_MERGES, VOCAB = 40, 352
PLACES = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
ADDED = ["<think>", "</think>", "<answer>", "</answer>"]
# SmolVLM v1 spells the tags of places and of the whole picture in ordinary tokens.
TAGS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>"]
SPECIAL = {
    "smolvlm": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<global-img>", *PLACES, *TAGS],
    "idefics3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *TAGS],
}
# name -> class, tied head, side of a tile, patch, scale, longest edge, seed
CHECKPOINTS = {
    # Seeds: every greedy step of every case is decided clearly.
    "smolvlm": ("smolvlm", False, 24, 4, 3, 72, 63),
    "smolvlm_tied": ("smolvlm", True, 32, 4, 4, 64, 3),
    "smolvlm_v1": ("idefics3", False, 27, 6, 2, 54, 2),
}
# The published template of both: it has no videos, so transformers takes another one for them.
TEMPLATE = DEFAULT_CHAT_TEMPLATE.replace("{% elif line['type'] == 'video' %}{{ '<video>' }}", "")
CASES = {
    "A": ("Image-1: <image>\nImage-2: <image>\nAre they equal?", ["noise.png", "shapes.png"]),
    "B": ("How many shapes are there? Think, then answer 42, naïve café.\n", []),
    "C": ("<image>\nWhat is shown in the image?", ["shapes.png"]),
    "D": ("<video>\nWhich way does the ball move?", [FRAMES[:4]]),
    "E": ("First <image>\nthen <video>\nand <image>: which is red?", ["alpha.png", FRAMES[:2], "shapes.png"]),
    # Without a placeholder media come first.
    "F": ("What is shown in the image?", ["noise.png"]),
}
RESULTS = {"smolvlm": "ABCDEF", "smolvlm_tied": "CDE", "smolvlm_v1": "ABCF"}


def ids_of(name):
    special = SPECIAL[CHECKPOINTS[name][0]]
    return {t: 256 + NUM_MERGES + i for i, t in enumerate(special + ADDED)}


def tokens_per_tile(name):
    _, _, side, patch, scale, _, _ = CHECKPOINTS[name]
    return (side // patch // scale) ** 2


def hub_config(name):
    """config.json in the form of the hub: what it leaves out there is left out here, as far as sizes allow."""
    family, tied, side, patch, scale, _, _ = CHECKPOINTS[name]
    ids = ids_of(name)
    text = dict(
        architectures=["VLlama3ForCausalLM"], bos_token_id=ids["<|im_start|>"], eos_token_id=ids["<end_of_utterance>"],
        head_dim=16, hidden_size=48, intermediate_size=40, max_position_embeddings=1024, model_type="llama",
        num_attention_heads=3, num_hidden_layers=2, num_key_value_heads=1, pad_token_id=ids["<|im_end|>"],
        rms_norm_eps=1e-5, rope_theta=100000, torch_dtype="float32", vocab_size=VOCAB,
    )
    vision = dict(
        hidden_size=32, image_size=side, intermediate_size=20, max_image_size={"longest_edge": side},
        model_type=f"{family}_vision" if family == "smolvlm" else "idefics3", num_attention_heads=2, num_hidden_layers=3,
        patch_size=patch, size={"longest_edge": 1920}, tie_word_embeddings=False, use_base_siglip=False,
    )
    config = dict(
        architectures=["SmolVLMForConditionalGeneration" if family == "smolvlm" else "Idefics3ForConditionalGeneration"],
        image_token_id=ids["<image>"], model_type=family, pad_token_id=128002, scale_factor=scale, text_config=text,
        tie_word_embeddings=tied, torch_dtype="float32", transformers_version="4.47.1", use_cache=True,
        vision_config=vision,
    )
    if name == "smolvlm_tied":
        # The heads of the language model and of the tower: 32 and 16.
        text |= dict(hidden_size=64, num_hidden_layers=1)
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"):
            del text[key]
        del vision["num_attention_heads"]
    if name == "smolvlm_v1":
        # The depth of the tower: 12.
        vision |= dict(hidden_size=16, intermediate_size=12)
        del vision["num_hidden_layers"]
        del config["pad_token_id"]
    return config


def scale(n, p):
    if "position_embedding" in n:
        return 0.7
    gain = (1.3 if "connector" in n else 0.9) if "text_model" not in n else (2.5 if is_loud(n) else 1.2)
    return gain / math.sqrt(p[0].numel())


def new_model(name):
    """Random weights with a useful spread: no bias is 0, no norm weight is 1."""
    family = CHECKPOINTS[name][0]
    raw = copy.deepcopy(hub_config(name))
    raw = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "torch_dtype", "transformers_version")}
    raw["vision_config"]["model_type"] = f"{family}_vision"
    config_class, model_class = {
        "smolvlm": (SmolVLMConfig, SmolVLMForConditionalGeneration),
        "idefics3": (Idefics3Config, Idefics3ForConditionalGeneration),
    }[family]
    model = model_class._from_config(config_class(**raw), attn_implementation="eager", dtype=torch.float32).eval()
    randomise(sorted(model.named_parameters()), CHECKPOINTS[name][-1], scale)
    return model


def build_tokenizer(name):
    tokenizer = byte_level_bpe(CORPUS, NUM_MERGES, SPECIAL[CHECKPOINTS[name][0]], ADDED)
    assert all(tokenizer.token_to_id(t) == i for t, i in ids_of(name).items())
    return tokenizer


def picture_settings(name):
    _, _, side, _, _, longest, _ = CHECKPOINTS[name]
    return dict(size={"longest_edge": longest}, max_image_size={"longest_edge": side}, resample=1)


def video_settings(name):
    """`size` of the image processor's file takes precedence over that of `video_sampling`."""
    _, _, side, _, _, longest, _ = CHECKPOINTS[name]
    sampling = dict(fps=1, max_frames=64, video_size={"longest_edge": side})
    whole = dict(size={"longest_edge": longest}, max_image_size={"longest_edge": side}, video_sampling=sampling)
    if name == "smolvlm_tied":
        del whole["size"]
    return whole


def pictures_of(name, medium):
    """(squares [n, 3, side, side], rows, columns) of an image, or of the frames of a video."""
    pil = SmolVLMImageProcessorPil if CHECKPOINTS[name][0] == "smolvlm" else Idefics3ImageProcessorPil
    if isinstance(medium, list):
        longest = SmolVLMVideoProcessor(**video_settings(name)).size["longest_edge"]
        own = picture_settings(name) | dict(size={"longest_edge": longest}, do_image_splitting=False)
        out = pil(**own)(images=[open_rgb(MEDIA / p) for p in medium], return_tensors="pt")
        return out["pixel_values"].float().flatten(0, 1), 0, 0
    out = pil(**picture_settings(name))(
        images=[open_rgb(MEDIA / medium)], return_row_col_info=True, return_tensors="pt"
    )
    return out["pixel_values"][0].float(), int(out["rows"][0][0]), int(out["cols"][0][0])


def processor_of(name):
    ids = ids_of(name)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(name), bos_token="<|im_start|>", eos_token="<end_of_utterance>",
        pad_token="<|im_end|>",
    )
    assert tokenizer.convert_tokens_to_ids("<image>") == ids["<image>"]
    own = dict(image_seq_len=tokens_per_tile(name), chat_template=TEMPLATE)
    if CHECKPOINTS[name][0] == "idefics3":
        return Idefics3Processor(Idefics3ImageProcessorPil(**picture_settings(name)), tokenizer, **own)
    return SmolVLMProcessor(
        SmolVLMImageProcessorPil(**picture_settings(name)), tokenizer, SmolVLMVideoProcessor(**video_settings(name)),
        **own,
    )


def write_sidecars(directory, name):
    family, _, side, _, _, _, _ = CHECKPOINTS[name]
    ids = ids_of(name)
    build_tokenizer(name).save(str(directory / "tokenizer.json"), pretty=False)
    added = {
        str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False,
                     special=t in SPECIAL[family])
        for t, i in ids.items()
    }
    own = dict(chat_template=TEMPLATE) if name == "smolvlm_v1" else {}
    write_json(directory / "tokenizer_config.json", dict(
        added_tokens_decoder=added, bos_token="<|im_start|>", clean_up_tokenization_spaces=False,
        eos_token="<end_of_utterance>", model_max_length=1024, pad_token="<|im_end|>",
        tokenizer_class="PreTrainedTokenizerFast", truncation_side="left", unk_token="<|endoftext|>", **own,
    ))
    if name == "smolvlm":
        write_json(directory / "chat_template.json", dict(chat_template=TEMPLATE))
    settings = picture_settings(name) | dict(
        do_convert_rgb=True, do_image_splitting=True, do_normalize=True, do_pad=True, do_rescale=True, do_resize=True,
        image_mean=[0.5] * 3, image_processor_type="SmolVLMImageProcessor" if family == "smolvlm" else
        "Idefics3ImageProcessor", image_std=[0.5] * 3, rescale_factor=0.00392156862745098,
        processor_class="SmolVLMProcessor" if family == "smolvlm" else "Idefics3Processor",
    )
    if name == "smolvlm":
        settings |= dict(video_sampling=video_settings(name)["video_sampling"])
    write_json(directory / "preprocessor_config.json", settings)
    if name == "smolvlm_tied":
        write_json(directory / "video_preprocessor_config.json", video_settings(name))
    write_json(directory / "processor_config.json", dict(
        image_seq_len=tokens_per_tile(name), processor_class=settings["processor_class"]
    ))
    write_json(directory / "generation_config.json", dict(
        bos_token_id=ids["<|im_start|>"], eos_token_id=ids["<end_of_utterance>"], pad_token_id=ids["<|im_end|>"],
    ))


def write_checkpoints():
    for name in CHECKPOINTS:
        directory = fixtures.CHECKPOINTS / name
        shutil.rmtree(directory, ignore_errors=True)
        model = new_model(name)
        tensors = {n: p.detach() for n, p in model.named_parameters()}
        assert ("lm_head.weight" in tensors) != CHECKPOINTS[name][1]
        # transformers writes these names.
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            from safetensors import safe_open
            with safe_open(f"{scratch}/model.safetensors", "pt") as file:
                assert set(file.keys()) == set(tensors), set(file.keys()) ^ set(tensors)
        save_tensors(directory / "model.safetensors", tensors, format="pt")
        write_json(directory / "config.json", hub_config(name))
        write_sidecars(directory, name)
        # From this directory transformers reads this model, with the defaults of its classes.
        loaded = type(model).from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
        assert all(torch.equal(p, tensors[n]) for n, p in loaded.named_parameters())
        assert loaded.config.text_config.to_dict() == model.config.text_config.to_dict()


def metadata_of(frames):
    """A list of pictures has two a second."""
    return VideoMetadata(
        total_num_frames=len(frames), fps=2.0, duration=len(frames) / 2, frames_indices=list(range(len(frames)))
    )


def render(name, text, media):
    """The prompt as a string, media expanded, by the processor's own template and replacements."""
    processor = processor_of(name)
    spell = []
    for medium in media:
        pictures, rows, columns = pictures_of(name, medium)
        if isinstance(medium, list):
            inputs = dict(pixel_values=pictures[None], video_metadata=[metadata_of(medium)])
            spell.append(processor.replace_video_token(inputs, 0))
        else:
            spell.append(processor.replace_image_token(dict(rows=[[rows]], cols=[[columns]]), 0))
    pieces = [p for p in re.split(r"(<image>|<video>)", text) if p]
    if media and len(pieces) == 1:
        pieces = ["<video>" if isinstance(m, list) else "<image>" for m in media] + pieces
    content = [{"type": p[1:-1]} if p in ("<image>", "<video>") else {"type": "text", "text": p} for p in pieces]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    parts = [spelled if p in ("<image>", "<video>") else p
             for p, spelled in number(re.split(r"(<image>|<video>)", prompt), spell)]
    return "".join(parts)


def encode(name, text):
    return build_tokenizer(name).encode(text, add_special_tokens=False).ids


def features(model, squares):
    own = torch.cat(squares)[None] if squares else None
    if own is None:
        return None
    out = model.model.get_image_features(own.to(model.dtype), None).pooler_output
    return torch.cat(list(out)).flatten(0, -2)


def logits_of(model, ids, squares):
    image = model.config.image_token_id
    ids = torch.tensor([ids])
    pixels = dict(pixel_values=torch.cat(squares)[None].to(model.dtype)) if squares else {}
    assert squares or not (ids == image).any()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **pixels).logits[0]


def logp_of(model, prompt, completion, squares):
    rows = logits_of(model, prompt + completion, squares)[len(prompt) - 1 : -1]
    return rows, rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def run_case(model, name, case, inputs):
    text, media = CASES[case]
    ids = ids_of(name)
    prompt = encode(name, render(name, text, media))
    squares = [pictures_of(name, medium)[0] for medium in media]
    out = {"prompt_ids": torch.tensor(prompt)}
    if squares:
        with torch.no_grad():
            out["features"] = features(model, squares)
        # Pictures themselves are compared by sketches of all squares.
        out["pixels"] = torch.stack([sketch(pixels) for pixels in squares])
    model.zero_grad(set_to_none=True)
    rows, logp = logp_of(model, prompt, inputs["completion"][name], squares)
    loss = (inputs["coefficients"] * logp).sum()
    loss.backward()
    out |= dict(logits=rows, logp=logp, loss=loss.reshape(1))
    out["completion_ids"] = torch.tensor(inputs["completion"][name])
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all(), n
            out[f"sketch.{n}"] = sketch(p.grad)
            if case == "C" and name == "smolvlm" and ("connector" in n or "text_model.layers.1." in n):
                out[f"grad.{n}"] = p.grad
    tokens, margins = greedy(lambda tokens: logits_of(model, prompt + tokens, squares)[-1], GREEDY_TOKENS, ids["<image>"])
    print(f"{name} {case}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
    out["greedy"] = torch.tensor(tokens)
    special = set(ids[t] for t in SPECIAL[CHECKPOINTS[name][0]])
    return out, min(margins) > 1e-3 and not set(tokens) & special


def write_cases():
    generator = torch.Generator().manual_seed(29)
    lines, cases = [], {}
    for case, (text, media) in CASES.items():
        lines.append(row_of(case, text, media))
        completion = torch.randint(0, 256, (8,), generator=generator).tolist()
        own = {name: completion[:5] + [ids_of(name)["<answer>"]] + completion[6:] for name in CHECKPOINTS}
        cases[case] = dict(completion=own, coefficients=torch.randn(8, generator=generator))
        save_tensors(ROOT / f"{case}.safetensors", dict(coefficients=cases[case]["coefficients"]))
    (ROOT / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name, wanted in RESULTS.items():
        model = new_model(name)
        for case in wanted:
            out, decided = run_case(model, name, case, cases[case])
            assert decided, (name, case)
            save_tensors(ROOT / f"{case}.{name}.safetensors", out)


def check_processor():
    """Ids and pixels of prompts with images are what transformers' own processor makes in one call."""
    for name in CHECKPOINTS:
        processor = processor_of(name)
        for case in "AC":
            text, media = CASES[case]
            content = [
                {"type": "image"} if p == "<image>" else {"type": "text", "text": p}
                for p in re.split(r"(<image>)", text) if p
            ]
            prompt = processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            pictures = [open_rgb(MEDIA / m) for m in media]
            out = processor(text=[prompt], images=[pictures], return_tensors="pt", add_special_tokens=False)
            assert out["input_ids"][0].tolist() == encode(name, render(name, text, media)), (name, case)
            squares = torch.cat([pictures_of(name, m)[0] for m in media])
            assert torch.equal(out["pixel_values"][0].float(), squares), (name, case)


def write_rules():
    """Arrangements of tiles `[width, height, longest edge, side, rows, columns]`; chosen frames."""
    generator = np.random.default_rng(5)
    tiles = []
    sizes = [(512, 128), (384, 96), (90, 27), (47, 47), (4200, 600)]
    for k in range(150):
        longest, side = sizes[k % 5]
        w, h = (int(x) for x in generator.integers(1, (400, 40)[k % 7 == 3], 2))
        h = w if k % 11 == 0 else h
        pil = SmolVLMImageProcessorPil(size={"longest_edge": longest}, max_image_size={"longest_edge": side})
        out = pil(np.zeros((h, w, 3), dtype=np.uint8), return_row_col_info=True, return_tensors="np",
                  input_data_format="channels_last") if longest < 1000 or k < 30 else None
        if out is None:
            continue
        tiles.append([w, h, longest, side, max(int(out["rows"][0][0]), 1), max(int(out["cols"][0][0]), 1)])
    video = SmolVLMVideoProcessor(video_sampling=dict(fps=1, max_frames=64, video_size={"longest_edge": 512}))
    frames = []
    for k in range(60):
        total = int(generator.integers(1, (60, 4000)[k % 2]))
        fps = float((1, 2, 12.5, 24, 25, 29.97, 30, 60)[k % 8])
        rate, most = ((1, 64), (2, 8), (0.5, 16), (1, 4))[k % 4]
        metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
        indices = video.sample_frames(metadata, num_frames=most, fps=rate)
        frames.append([total, fps, rate, most, [int(i) for i in indices]])
    write_json(ROOT / "rules.json", dict(tiles=tiles, frames=frames))


def write_chats():
    """Conversations with answers, as ids up to the end of the last answer: the template of the processor."""
    said = lambda role, text: dict(role=role, content=[dict(type="text", text=text)])
    chats = [
        [said("user", "What is 2+3?"), said("assistant", "The answer is 5.")],
        [said("system", "Be brief."), said("user", "Why?"), said("assistant", "Because."), said("user", "Really?"),
         said("assistant", "<answer>Yes</answer>")],
    ]
    rows = []
    for messages in chats:
        text = processor_of("smolvlm").apply_chat_template(messages, tokenize=False)
        text = text[: text.rindex("<end_of_utterance>")] + "<end_of_utterance>"
        rows.append(dict(messages=messages, ids=encode("smolvlm", text)))
    write_json(ROOT / "chats.json", rows)


def write_replay():
    """Three steps of GRPO by transformers' model and torch's optimizer."""
    name, prepared = "smolvlm", []
    for row in ROWS:
        media = ["shapes.png"] if "image" in row["media"] else [FRAMES] if "video" in row["media"] else []
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        prepared.append(dict(
            row=row["id"], prompt=encode(name, render(name, row["question"], media)),
            pixels=[pictures_of(name, m)[0] for m in media], completions=[encode(name, c) for c in row["completions"]],
            advantages=((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(),
        ))
    logp = lambda model, item, completion, dtype: logp_of(model, item["prompt"], completion, item["pixels"])[1]
    three_steps(name, new_model(name), prepared, logp, str)


def main():
    ROOT.mkdir(parents=True, exist_ok=True)
    write_cases()
    write_checkpoints()
    check_processor()
    write_rules()
    write_chats()
    write_replay()


if __name__ == "__main__":
    main()
