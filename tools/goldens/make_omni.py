"""Qwen2.5-Omni, whole and the thinker alone, and Qwen2-Audio: checkpoints, cases, three AdamW steps. The rows of the cases are read by
the tests as they stand, so prompts, pixels and spectrograms are compared from the file on.

A row with `interleave` shows a clip with its own sound inside. The tests name the sound in a file of its own, because the clips are
pictures; a run reads it from the clip.
"""

import copy
import json
import math
import re
import shutil
import struct
import tempfile

import fixtures
import numpy as np
import torch
from fixtures import (
    FRAMES, MAX_PIXELS, MEDIA, MIN_PIXELS, OUT, greedy, is_loud, process_frames, process_images, randomise, save_tensors, sketch,
    write_json,
)
from make_checkpoints import CORPUS, byte_level_bpe
from make_internvl import three_steps
from make_replay import ROWS
from safetensors import safe_open
from transformers import (
    PreTrainedTokenizerFast, Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration, Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration, Qwen2AudioProcessor, Qwen2VLVideoProcessor, WhisperFeatureExtractor,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

OMNI, AUDIO = OUT / "qwen_omni", OUT / "qwen_audio"
GREEDY_TOKENS = 12
NUM_MERGES, VOCAB = 40, 320
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "<|vision_bos|>",
    "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>",
]
ADDED = ["<think>", "</think>", "<answer>", "</answer>"]
ID = {t: 256 + NUM_MERGES + i for i, t in enumerate(SPECIAL + ADDED)}
EOT, IM_END = ID["<|endoftext|>"], ID["<|im_end|>"]
MELS, MAX_POSITIONS = 16, 2048
# Seconds of sound that the processors of both families read.
WINDOW = {"omni": 40, "omni_thinker": 40, "qwen2_audio": 1}
# Seeds: every greedy step of every case is decided clearly.
SEEDS = {"omni": 84, "omni_thinker": 2, "qwen2_audio": 5}
# Same output as the published template, written for this project.
TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if loop.first and message.role != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message.role + '\\n' -}}"
    "{%- if message.content is string -%}{{- message.content -}}{%- else -%}"
    "{%- for part in message.content -%}"
    "{%- if part.type == 'image' -%}{{- '<|vision_bos|><|IMAGE|><|vision_eos|>' -}}"
    "{%- elif part.type == 'audio' -%}{{- '<|audio_bos|><|AUDIO|><|audio_eos|>' -}}"
    "{%- elif part.type == 'video' -%}{{- '<|vision_bos|><|VIDEO|><|vision_eos|>' -}}"
    "{%- elif part.type == 'text' -%}{{- part.text -}}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
TAG = {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}
# case -> text with placeholders in the order of the media; media: a picture, (frames, frames per second), a sound. In cases with a
# star a clip is interleaved with the sound after it.
CASES = {
    "A": ("<image>\n<audio>\nWhat is shown in the image?", ["noise.png", "sounds/short.wav"]),
    "B": ("How many shapes are there? Think, then answer 42, naïve café.\n", []),
    "C": ("<audio>\nWhat do you hear? <image>", ["sounds/two.wav", "shapes.png"]),
    # A clip and a sound one after the other.
    "D": ("<video>\n<audio>\nWhich way does the ball move?", [(FRAMES, 2), "sounds/two.wav"]),
    # 31 seconds of sound.
    "E": ("First <image>\nthen <audio>\nand <video>: which is red?", ["alpha.png", "sounds/long.wav", (FRAMES[:4], 1)]),
    # The clip is longer than the sound, and a slice of it is longer than a stretch.
    "F*": ("<video><audio>\nWhich way does the ball move?", [(FRAMES, 0.4), "sounds/two.wav"]),
    # The sound is longer than the clip.
    "G*": ("<video><audio>\nWhich way does the ball move?", [(FRAMES[:4], 2), "sounds/long.wav"]),
    # The clip ends within the last stretch of the sound.
    "H*": ("<image>\n<video><audio>\nWhich way?", ["shapes.png", (FRAMES, 1.25), "sounds/five.wav"]),
    # A clip without sound.
    "I": ("<video>\nWhich way does the ball move?", [(FRAMES, 2)]),
}
SOUNDS = {
    "A": ("<audio>\nWhat do you hear?", ["sounds/short.wav"]),
    "B": ("How many shapes are there? Think, then answer 42, naïve café.\n", []),
    "C": ("First <audio>\nthen <audio>: which is louder?", ["rise.wav", "sounds/short.wav"]),
    # Longer than the window.
    "D": ("<audio>\nWhat do you hear?", ["sounds/two.wav"]),
}
RESULTS = {"omni": "ABCDEFGHI", "omni_thinker": "CDEFGH", "qwen2_audio": "ABCD"}
# A short repetition, so that the file of 31 s is small when compressed.
LENGTHS = {"short": 0.05, "two": 2.0, "five": 5.3, "long": 31.0}


def make_sounds():
    """16 bit, 16 kHz, mono: a tone that is louder in the middle of each half second."""
    (MEDIA / "sounds").mkdir(parents=True, exist_ok=True)
    for i, (name, secs) in enumerate(LENGTHS.items()):
        n = round(secs * 16000)
        t = (np.arange(n) % 4000) / 16000
        data = (0.5 * np.sin(2 * np.pi * (220 + 110 * i) * t) * np.sin(2 * np.pi * 4 * t) * 32767).astype("<i2").tobytes()
        header = struct.pack(
            "<4sI4s4sIHHIIHH4sI", b"RIFF", 36 + len(data), b"WAVE", b"fmt ", 16, 1, 1, 16000, 32000, 2, 16, b"data", len(data)
        )
        (MEDIA / f"sounds/{name}.wav").write_bytes(header + data)


def samples_of(path):
    return np.frombuffer((MEDIA / path).read_bytes()[44:], "<i2").astype(np.float32) / 32768


def thinker_config(name):
    """The thinker's configuration in the form of the hub."""
    small = name == "omni"
    text = dict(
        attention_dropout=0.0, hidden_act="silu", hidden_size=48, init_std=0.02, initializer_range=0.02, intermediate_size=40,
        max_position_embeddings=MAX_POSITIONS, max_window_layers=28, model_type="qwen2_5_omni_text",
        num_attention_heads=3, num_hidden_layers=2 if small else 3, num_key_value_heads=1, rms_norm_eps=1e-6,
        rope_scaling={"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}, rope_theta=1000000.0,
        sliding_window=32768, tie_word_embeddings=False, use_cache=True, use_sliding_window=False, vocab_size=VOCAB,
    )
    # A piece of the thinker-only tower has an odd number of rows, so a pair of rows has one of each of two pieces.
    audio = dict(
        activation_function="gelu", d_model=16, dropout=0.0, encoder_attention_heads=2, encoder_ffn_dim=24,
        encoder_layers=2 if small else 1, max_source_positions=1500, model_type="qwen2_5_omni_audio_encoder",
        n_window=10 if small else 7, num_hidden_layers=2 if small else 1, num_mel_bins=MELS, output_dim=48, scale_embedding=False,
    )
    vision = dict(
        depth=2 if small else 3, embed_dim=16, fullatt_block_indexes=[1], hidden_act="silu", hidden_size=16, in_channels=3,
        in_chans=3, intermediate_size=24, model_type="qwen2_5_omni_vision_encoder", num_heads=2, out_hidden_size=48,
        patch_size=14, spatial_merge_size=2, spatial_patch_size=14, temporal_patch_size=2, tokens_per_second=25,
        window_size=56,
    )
    return dict(
        architectures=["Qwen2OmniNaViTThinkerForConditionalGeneration"], audio_config=audio, audio_end_token_id=ID["<|audio_eos|>"],
        audio_start_token_id=ID["<|audio_bos|>"], audio_token_index=ID["<|AUDIO|>"], bos_token_id=ID["<|im_start|>"],
        eos_token_id=IM_END, ignore_index=-100, image_token_index=ID["<|IMAGE|>"], initializer_range=0.02,
        model_type="qwen2_5_omni_thinker", pad_token_id=EOT, position_id_per_seconds=25, seconds_per_chunk=2,
        text_config=text, torch_dtype="float32", user_token_id=872, video_token_index=ID["<|VIDEO|>"],
        vision_config=vision, vision_end_token_id=ID["<|vision_eos|>"], vision_start_token_id=ID["<|vision_bos|>"],
        vision_token_id=ID["<|vision_pad|>"],
    )


def speaker_configs():
    """Talker and decoder of waves, as small as they can be."""
    talker = dict(
        embedding_size=48, head_dim=8, hidden_size=8, intermediate_size=8, model_type="qwen2_5_omni_talker",
        num_attention_heads=2, num_hidden_layers=1, num_key_value_heads=1,
        rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"}, rope_theta=1000000.0,
        vocab_size=20,
    )
    dit = dict(
        emb_dim=4, enc_attention_channels=4, enc_channels=[4] * 5, enc_dilations=[1, 2, 3, 4, 1], enc_dim=4, enc_emb_dim=4,
        enc_kernel_sizes=[5, 3, 3, 3, 1], enc_res2net_scale=2, enc_se_channels=4, head_dim=4, hidden_size=8, mel_dim=4,
        model_type="qwen2_5_omni_dit", num_attention_heads=2, num_embeds=9, num_hidden_layers=1,
    )
    vocoder = dict(
        mel_dim=4, model_type="qwen2_5_omni_bigvgan", resblock_dilation_sizes=[[1, 3, 5]], resblock_kernel_sizes=[3],
        upsample_initial_channel=8, upsample_kernel_sizes=[11], upsample_rates=[5],
    )
    return talker, dict(bigvgan_config=vocoder, dit_config=dit, model_type="qwen2_5_omni_token2wav")


def hub_config(name):
    if name == "qwen2_audio":
        # The text section leaves out what the class defaults give in the published file; sizes that differ from these are here.
        return dict(
            architectures=["Qwen2AudioForConditionalGeneration"],
            audio_config=dict(
                activation_function="gelu", d_model=16, encoder_attention_heads=2, encoder_ffn_dim=24, encoder_layers=2,
                max_source_positions=50, model_type="qwen2_audio_encoder", num_mel_bins=MELS, scale_embedding=False,
            ),
            audio_token_index=ID["<|AUDIO|>"], ignore_index=-100, model_type="qwen2_audio",
            text_config=dict(
                hidden_size=48, intermediate_size=80, max_position_embeddings=512, model_type="qwen2",
                num_attention_heads=3, num_hidden_layers=2, num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=10000,
                torch_dtype="float32", vocab_size=VOCAB,
            ),
            torch_dtype="float32", transformers_version="4.38.1",
        )
    thinker = thinker_config(name)
    if name == "omni_thinker":
        return thinker | dict(architectures=["Qwen2_5OmniThinkerForConditionalGeneration"])
    talker, waves = speaker_configs()
    return dict(
        architectures=["Qwen2_5OmniModel"], enable_audio_output=True, enable_talker=True, model_type="qwen2_5_omni",
        talker_config=talker, thinker_config=thinker, token2wav_config=waves, torch_dtype="float32",
        transformers_version="4.52.0.dev0",
    )


def scale(name, n, p):
    if "embed_positions" in n:
        return 0.7
    if "visual" in n or "audio_tower" in n:
        gain = 1.5 if "merger" in n or "audio_tower.proj" in n else 0.8
    else:
        # Calm enough for the steps in bfloat16 of the tests.
        loud, other = (1.5, 0.9) if name == "qwen2_audio" else (2.5, 1.2)
        gain = loud if is_loud(n) else other
    return gain / math.sqrt(p[0].numel())


def build(name):
    """The whole model of a checkpoint."""
    raw = copy.deepcopy(hub_config(name))
    raw = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "torch_dtype", "transformers_version")}
    config, model = {
        "omni": (Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration),
        "omni_thinker": (Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration),
        "qwen2_audio": (Qwen2AudioConfig, Qwen2AudioForConditionalGeneration),
    }[name]
    torch.manual_seed(0)
    whole = model._from_config(config(**raw), attn_implementation="eager", dtype=torch.float32).eval()
    # transformers never trains the stored positions of Qwen2-Audio; here they are trained with the tower.
    whole.requires_grad_(True)
    randomise(sorted(whole.named_parameters()), SEEDS[name], lambda n, p: scale(name, n, p))
    return whole


def new_model(name):
    """The part that reads and writes text."""
    whole = build(name)
    return whole.thinker if name == "omni" else whole


def published_name(name):
    """Name in the modules of the part that reads and writes text -> name in files."""
    def of(n):
        if name == "qwen2_audio":
            n = "language_model.lm_head.weight" if n == "lm_head.weight" else n.removeprefix("model.")
            return re.sub(r"^language_model\.(?!lm_head)", "language_model.model.", n)
        n = re.sub(r"^model\.(visual|audio_tower)\.", r"\1.", n).replace("model.language_model.", "model.")
        return ("thinker." if name == "omni" else "") + n
    return of


def build_tokenizer():
    tokenizer = byte_level_bpe(CORPUS, NUM_MERGES, SPECIAL, ADDED)
    assert all(tokenizer.token_to_id(t) == i for t, i in ID.items()) and max(ID.values()) < VOCAB
    return tokenizer


def audio_settings(name):
    return dict(
        chunk_length=WINDOW[name], dither=0.0, feature_size=MELS, hop_length=160, n_fft=400, padding_side="right",
        padding_value=0.0, return_attention_mask=True, sampling_rate=16000,
    )


def write_sidecars(directory, name):
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    added = {
        str(i): dict(content=t, lstrip=False, normalized=False, rstrip=False, single_word=False, special=t in SPECIAL)
        for t, i in ID.items()
    }
    write_json(directory / "tokenizer_config.json", dict(
        added_tokens_decoder=added, additional_special_tokens=SPECIAL[1:], bos_token=None, eos_token="<|im_end|>",
        errors="replace", model_max_length=MAX_POSITIONS, pad_token="<|endoftext|>", split_special_tokens=False,
        tokenizer_class="Qwen2Tokenizer", unk_token=None, audio_bos_token="<|audio_bos|>",
    ))
    settings = audio_settings(name) | dict(feature_extractor_type="WhisperFeatureExtractor")
    if name == "qwen2_audio":
        settings |= dict(processor_class="Qwen2AudioProcessor")
    else:
        settings |= dict(
            image_mean=[0.48145466, 0.4578275, 0.40821073], image_processor_type="Qwen2VLImageProcessor",
            image_std=[0.26862954, 0.26130258, 0.27577711], max_pixels=MAX_PIXELS, merge_size=2, min_pixels=MIN_PIXELS,
            patch_size=14, processor_class="Qwen2_5OmniProcessor", temporal_patch_size=2,
        )
        write_json(directory / "chat_template.json", dict(chat_template=TEMPLATE))
    write_json(directory / "preprocessor_config.json", settings)
    write_json(directory / "generation_config.json", dict(
        _from_model_config=True, transformers_version="4.52.4", **(dict(eos_token_id=[IM_END, EOT]) if name == "qwen2_audio" else {}),
    ))


def write_checkpoints():
    for name in SEEDS:
        directory = fixtures.CHECKPOINTS / name
        shutil.rmtree(directory, ignore_errors=True)
        whole = build(name)
        with tempfile.TemporaryDirectory() as scratch:
            whole.save_pretrained(scratch)
            with safe_open(f"{scratch}/model.safetensors", "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}
        model = whole.thinker if name == "omni" else whole
        own = {published_name(name)(n): p for n, p in model.named_parameters()}
        assert all(torch.equal(tensors[n], p) for n, p in own.items())
        if name == "omni":
            assert {n.split(".")[0] for n in tensors if n not in own} == {"talker", "token2wav"}
            (directory).mkdir(parents=True)
            # The voices of the talker.
            torch.save({"Ethan": dict(bos_token=1)}, directory / "spk_dict.pt")
        else:
            assert set(tensors) == set(own)
        save_tensors(directory / "model.safetensors", tensors, format="pt")
        write_json(directory / "config.json", hub_config(name))
        write_sidecars(directory, name)
        loaded = type(whole).from_pretrained(directory, attn_implementation="eager", dtype=torch.float32)
        before = dict(whole.named_parameters())
        assert all(torch.equal(p, before[n]) for n, p in loaded.named_parameters())


# ---------------------------------------------------------------------------------------------------------- prompts


def extractor(name):
    return WhisperFeatureExtractor(**audio_settings(name))


def sounds(name, paths):
    """Features `[n, mels, frames]` and the mask of the frames that are heard, as the processors make them."""
    out = extractor(name)(
        [samples_of(p) for p in paths], sampling_rate=16000, padding="max_length", return_attention_mask=True,
        return_tensors="pt",
    )
    return out["input_features"], out["attention_mask"]


def count(mask):
    return ((mask.sum(-1) - 1) // 2 + 1 - 2) // 2 + 1


def processor_of(name):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build_tokenizer(), eos_token="<|im_end|>", pad_token="<|endoftext|>",
        extra_special_tokens=dict(
            image_token="<|IMAGE|>", video_token="<|VIDEO|>", audio_token="<|AUDIO|>", vision_bos_token="<|vision_bos|>",
            vision_eos_token="<|vision_eos|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
        ),
    )
    if name == "qwen2_audio":
        return Qwen2AudioProcessor(extractor(name), tokenizer)
    pixels = dict(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    return Qwen2_5OmniProcessor(
        Qwen2VLImageProcessorPil(**pixels), Qwen2VLVideoProcessor(**pixels), extractor(name), tokenizer,
        chat_template=TEMPLATE,
    )


def inputs_of(name, case):
    """Inputs of the model besides the ids, in the order of the prompt for each kind."""
    _, media = (SOUNDS if name == "qwen2_audio" else CASES)[case]
    out = {}
    if heard := [m for m in media if isinstance(m, str) and m.endswith(".wav")]:
        features, mask = sounds(name, heard)
        out |= dict(input_features=features, feature_attention_mask=mask)
    if pictures := [m for m in media if isinstance(m, str) and m.endswith(".png")]:
        pixels, grids = process_images(pictures)
        out |= dict(pixel_values=pixels, image_grid_thw=grids)
    if clips := [m for m in media if isinstance(m, tuple)]:
        rows = [process_frames(frames) for frames, _ in clips]
        out |= dict(
            pixel_values_videos=torch.cat([r[0] for r in rows]), video_grid_thw=torch.cat([r[1] for r in rows]),
            video_second_per_grid=torch.tensor([2.0 / fps for _, fps in clips]),
        )
        if case.endswith("*"):
            out |= dict(use_audio_in_video=True)
    return out


def spelled(name, case, inputs):
    """What replaces the tag of each medium, in order, by the processor's own functions."""
    processor = processor_of(name)
    text, media = (SOUNDS if name == "qwen2_audio" else CASES)[case]
    audio = dict(num_audio_tokens=count(inputs["feature_attention_mask"]).tolist()) if "feature_attention_mask" in inputs else {}
    images = dict(image_grid_thw=inputs.get("image_grid_thw"))
    videos = dict(
        video_grid_thw=inputs.get("video_grid_thw"),
        video_second_per_grid=inputs["video_second_per_grid"].tolist() if "video_second_per_grid" in inputs else None,
    )
    seen, out = dict(image=0, video=0, audio=0), []
    for kind in re.findall(r"<(image|video|audio)>", text):
        at = seen[kind]
        seen[kind] += 1
        if kind == "image":
            out.append(processor.replace_image_token(images, at))
        elif kind == "audio":
            out.append(processor.replace_audio_token(audio, at))
        else:
            own = dict(load_audio_from_video=case.endswith("*"), position_id_per_seconds=25, seconds_per_chunk=2.0)
            out.append(processor.replace_video_token(
                videos, at, processed_audio=audio, audio_inputs=audio, video_to_audio_indices=[0], **own
            ) if not case.endswith("*") else processor.replace_video_with_audio_token(videos, at, audio, 0, **own))
    return out


def prompt_of(name, case, inputs):
    """The ids of the prompt, media expanded."""
    text, _ = (SOUNDS if name == "qwen2_audio" else CASES)[case]
    return ids_of(name, text, spelled(name, case, inputs), case.endswith("*"))


def ids_of(name, text, spell, interleaved=False):
    processor = processor_of(name)
    pieces = [p for p in re.split(r"(<image>|<video>|<audio>)", text) if p]
    content = [{"type": p[1:-1]} if p in ("<image>", "<video>", "<audio>") else {"type": "text", "text": p} for p in pieces]
    if interleaved:
        # The sound is shown inside the clip.
        at = content.index({"type": "audio"})
        assert content[at - 1] == {"type": "video"}
        kinds = [c["type"] for c in content if c["type"] != "text"]
        content.pop(at)
        spell = [s for s, kind in zip(spell, kinds) if kind != "audio"]
    template = processor.chat_template if name != "qwen2_audio" else None
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], chat_template=template, add_generation_prompt=True, tokenize=False
    )
    tags = r"(<\|IMAGE\|>|<\|VIDEO\|>|<\|AUDIO\|>)"
    waiting = iter(spell)
    parts = [next(waiting) if re.fullmatch(tags, p) else p for p in re.split(tags, prompt)]
    assert next(waiting, None) is None
    return build_tokenizer().encode("".join(parts), add_special_tokens=False).ids


# ---------------------------------------------------------------------------------------------------------- results


def logits_of(model, ids, inputs):
    ids = torch.tensor([ids])
    own = {k: v.to(model.dtype) if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()}
    if "video_second_per_grid" in own:
        own["video_second_per_grid"] = inputs["video_second_per_grid"].float()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **own).logits[0]


def logp_of(model, prompt, completion, inputs):
    rows = logits_of(model, prompt + completion, inputs)[len(prompt) - 1 : -1]
    return rows, rows.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def features_of(model, name, case, inputs):
    """Features of the media in the order in which they begin in the prompt."""
    text, _ = (SOUNDS if name == "qwen2_audio" else CASES)[case]
    of = {}
    if "pixel_values" in inputs:
        of["image"] = list(model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"]).pooler_output)
    if "pixel_values_videos" in inputs:
        of["video"] = list(model.get_video_features(inputs["pixel_values_videos"], inputs["video_grid_thw"]).pooler_output)
    if "input_features" in inputs and name != "qwen2_audio":
        own = model.get_audio_features(inputs["input_features"], inputs["feature_attention_mask"]).last_hidden_state
        of["audio"] = list(own.split(count(inputs["feature_attention_mask"]).tolist()))
    kinds = re.findall(r"<(image|video|audio)>", text)
    if name == "qwen2_audio":
        return []
    return [of[kind].pop(0) for kind in kinds]


def run_case(model, name, case, inputs):
    media = inputs_of(name, case)
    prompt = prompt_of(name, case, media)
    out = {"prompt_ids": torch.tensor(prompt)}
    if "input_features" in media:
        heard = media["feature_attention_mask"].sum(-1).tolist()
        out["mels"] = torch.cat([sketch(f[:, :n]) for f, n in zip(media["input_features"], heard)])
    for key, name_of in (("pixel_values", "images"), ("pixel_values_videos", "videos")):
        if key in media:
            grids = media["image_grid_thw" if key == "pixel_values" else "video_grid_thw"].prod(-1).tolist()
            out[name_of] = torch.cat([sketch(p) for p in media[key].split(grids)])
    if name != "qwen2_audio":
        positions, _ = model.model.get_rope_index(
            torch.tensor([prompt]), media.get("image_grid_thw"), media.get("video_grid_thw"), torch.ones(1, len(prompt)).long(),
            media.get("use_audio_in_video", False),
            media["feature_attention_mask"].sum(-1) if "feature_attention_mask" in media else None,
            media.get("video_second_per_grid"),
        )
        out["position_ids"] = positions[:, 0]
    with torch.no_grad():
        if features := features_of(model, name, case, media):
            out["features"] = torch.cat(features)
    completion = inputs["completion"]
    model.zero_grad(set_to_none=True)
    rows, logp = logp_of(model, prompt, completion, media)
    loss = (inputs["coefficients"] * logp).sum()
    loss.backward()
    out |= dict(logits=rows, logp=logp, loss=loss.reshape(1), completion_ids=torch.tensor(completion))
    for n, p in model.named_parameters():
        if p.grad is not None:
            assert torch.isfinite(p.grad).all(), n
            out[f"sketch.{published_name(name)(n)}"] = sketch(p.grad)
    tokens, margins = greedy(lambda tokens: logits_of(model, prompt + tokens, media)[-1], GREEDY_TOKENS)
    print(f"{name} {case}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
    out["greedy"] = torch.tensor(tokens)
    return out, min(margins) > 1e-3 and max(tokens) < 256 + NUM_MERGES


def write_cases(root, cases, names):
    generator = torch.Generator().manual_seed(37)
    lines, inputs = [], {}
    for case, (text, media) in cases.items():
        row = dict(id=case[0])
        images = [f"media/{m}" for m in media if isinstance(m, str) and m.endswith(".png")]
        heard = [f"media/{m}" for m in media if isinstance(m, str) and m.endswith(".wav")]
        clips = [m for m in media if isinstance(m, tuple)]
        row |= dict(image=images) if images else {}
        row |= dict(audio=heard) if heard else {}
        if clips:
            row |= dict(video=[[f"media/{f}" for f in frames] for frames, _ in clips], fps=clips[0][1])
            row |= dict(min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
        row |= dict(interleave=True) if case.endswith("*") else {}
        row["conversations"] = [{"from": "human", "value": text}]
        lines.append(json.dumps(row, ensure_ascii=False))
        completion = torch.randint(0, 256, (8,), generator=generator).tolist()
        completion[5] = ID["<answer>"]
        inputs[case] = dict(completion=completion, coefficients=torch.randn(8, generator=generator))
        save_tensors(root / f"{case[0]}.safetensors", dict(coefficients=inputs[case]["coefficients"]))
    (root / "rows.jsonl").write_text("\n".join(lines) + "\n")
    for name in names:
        model = new_model(name)
        for case in cases:
            if case[0] in RESULTS[name]:
                out, decided = run_case(model, name, case, inputs[case])
                assert decided, (name, case)
                save_tensors(root / f"{case[0]}.{name}.safetensors", out)


def write_replay():
    """Three steps of GRPO by transformers' model and torch's optimizer."""
    name, prepared = "omni", []
    for row in ROWS:
        kind = next((k for k in ("image", "video") if k in row["media"]), None)
        inputs, spell = {}, []
        processor = processor_of(name)
        if kind == "image":
            pixels, grids = process_images(["shapes.png"])
            inputs = dict(pixel_values=pixels, image_grid_thw=grids)
            spell = [processor.replace_image_token(inputs, 0)]
        if kind == "video":
            pixels, grids = process_frames(FRAMES)
            inputs = dict(pixel_values_videos=pixels, video_grid_thw=grids, video_second_per_grid=torch.tensor([1.0]))
            spell = [processor.replace_video_token(inputs, 0, load_audio_from_video=False)]
        rewards = torch.tensor(row["rewards"], dtype=torch.float64)
        prepared.append(dict(
            row=row["id"], prompt=ids_of(name, row["question"], spell), inputs=inputs,
            completions=[build_tokenizer().encode(c, add_special_tokens=False).ids for c in row["completions"]],
            advantages=((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist(),
        ))
    logp = lambda model, item, completion, dtype: logp_of(model, item["prompt"], completion, item["inputs"])[1]
    model = new_model(name)
    # A table that only the talker uses.
    del model.model.audio_tower.audio_bos_eos_token
    three_steps(name, model, prepared, logp, published_name(name))


def main():
    for root in (OMNI, AUDIO):
        root.mkdir(parents=True, exist_ok=True)
    make_sounds()
    write_cases(OMNI, CASES, ("omni", "omni_thinker"))
    write_cases(AUDIO, SOUNDS, ("qwen2_audio",))
    write_checkpoints()
    write_replay()


if __name__ == "__main__":
    main()
