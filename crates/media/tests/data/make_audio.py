"""Writes tests/data/audio: short speech in every format, and what other programs make of it.

Needs espeak-ng, sox, ffmpeg (with libmp3lame, libvorbis, libopus, libx264), and Python with numpy, soxr, torch and transformers.

    python crates/media/tests/data/make_audio.py

speech.*     a spoken word, 0.2 s; `speech_stereo.wav` has it in the left channel and half of it, inverted, in the right
decoded.bin  `speech.wav` and the lossy files as ffmpeg decodes them, mixed to mono, i16 little-endian, one after the other
resampled.bin  `speech.wav` at 16 kHz by soxr (high quality, as librosa), f32
mel_*.bin    log-mel features of transformers' WhisperFeatureExtractor, f32 [mels, columns listed in audio.json]
audio.json   lengths, columns, tolerances measured here
"""

import json
import subprocess
import sys
import tempfile
import wave
from pathlib import Path

import numpy as np
import soxr
from transformers import WhisperFeatureExtractor

OUT = Path(__file__).parent / "audio"
RATE = 22050


def run(*args, **kwargs):
    return subprocess.run([str(a) for a in args], check=True, capture_output=True, **kwargs).stdout


def ffmpeg(*args):
    return run("ffmpeg", "-v", "error", "-y", "-bitexact", *args)


def speak(dir):
    whole = Path(dir) / "whole.wav"
    run("espeak-ng", "-v", "en", "-s", "170", "-w", whole, "yes")
    run("sox", whole, "-D", "-b", "16", "-r", str(RATE), "-c", "1", OUT / "speech.wav", "trim", "0.04", "0.2", "fade", "0.01", "0", "0.01")


def noise(n):
    """The generator of tests/audio.rs: 32-bit LCG, upper 16 bits, [-1, 1)."""
    state, out = 1, np.empty(n)
    for i in range(n):
        state = (state * 1664525 + 1013904223) % 2**32
        out[i] = (state >> 16) / 32768 - 1
    return out.astype(np.float32)


def decoded(path):
    raw = run("ffmpeg", "-v", "error", "-i", path, "-f", "f32le", "-")
    channels = int(run("ffprobe", "-v", "error", "-select_streams", "a:0", "-show_entries", "stream=channels", "-of", "csv=p=0", path).split()[0])
    return np.frombuffer(raw, "<f4").reshape(-1, channels).mean(1)


def main():
    OUT.mkdir(exist_ok=True)
    for old in OUT.iterdir():
        old.unlink()
    with tempfile.TemporaryDirectory() as dir:
        speak(dir)
    speech = OUT / "speech.wav"
    run("sox", speech, "-D", OUT / "speech_stereo.wav", "remix", "1", "1v-0.5")
    # 24 and 8 bits, float: 300 samples are enough.
    for name, options in [("24", ["-b", "24"]), ("u8", ["-b", "8", "-e", "unsigned"]), ("f32", ["-b", "32", "-e", "floating-point"])]:
        run("sox", "-D", speech, *options, OUT / f"short_{name}.wav", "trim", "0.05", "300s")
    ffmpeg("-i", speech, "-c:a", "flac", OUT / "speech.flac")
    ffmpeg("-i", speech, "-c:a", "libmp3lame", "-b:a", "48k", OUT / "speech.mp3")
    ffmpeg("-i", speech, "-c:a", "aac", "-b:a", "48k", OUT / "speech.m4a")
    ffmpeg("-i", speech, "-c:a", "aac", "-b:a", "48k", "-f", "adts", OUT / "speech.aac")
    ffmpeg("-i", speech, "-c:a", "libvorbis", "-q:a", "1", OUT / "speech.ogg")
    ffmpeg("-i", speech, "-c:a", "libopus", "-b:a", "24k", OUT / "speech.opus")
    picture = ["-f", "lavfi", "-i", "color=c=gray:s=16x16:r=5:d=0.2"]
    video = ["-c:v", "libx264", "-pix_fmt", "yuv420p", "-x264-params", "keyint=1:no-info=1"]
    ffmpeg(*picture, "-i", speech, *video, "-c:a", "aac", "-b:a", "48k", OUT / "clip.mp4")
    ffmpeg(*picture, *video, OUT / "mute.mp4")

    with wave.open(str(speech)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2") / 32768
    lengths, parts = {}, []
    for name in ["speech.wav", "speech.mp3", "speech.m4a", "speech.aac", "speech.ogg", "speech.opus", "clip.mp4"]:
        x = decoded(OUT / name)
        lengths[name] = len(x)
        parts.append(np.round(x * 32768).clip(-32768, 32767).astype("<i2"))
    np.concatenate(parts).tofile(OUT / "decoded.bin")

    resampled = soxr.resample(samples.astype(np.float32), RATE, 16000, quality="HQ")
    resampled.astype("<f4").tofile(OUT / "resampled.bin")

    mels = {}
    cases = {
        # name: (number of mel filters, samples at 16 kHz, columns kept)
        "noise_80": (80, noise(20_000) * 0.5, list(range(128)) + [128, 129, 1500, 2999]),
        "speech_128": (128, resampled, list(range(24)) + [24, 1500, 2999]),
        "long_128": (128, noise(16_000 * 31) * np.linspace(0, 1, 16_000 * 31, dtype=np.float32) * 0.5, [0, 1, 2, 777, 1500, 2996, 2997, 2998, 2999]),
        "silence_80": (80, np.zeros(1600, np.float32), [0, 5, 2999]),
    }
    for name, (num_mels, x, columns) in cases.items():
        extractor = WhisperFeatureExtractor(feature_size=num_mels)
        features = extractor(x, sampling_rate=16000)["input_features"][0]
        padded = np.zeros(480_000, np.float32)
        padded[: len(x)] = x[:480_000]
        twin = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
        print(f"{name}: torch and numpy forms differ by {np.abs(features - twin).max():.1e}", file=sys.stderr)
        assert features.shape == (num_mels, 3000)
        features[:, columns].astype("<f4").tofile(OUT / f"mel_{name}.bin")
        mels[name] = {"num_mels": num_mels, "columns": columns}
    (OUT / "preprocessor_config.json").write_text(json.dumps(WhisperFeatureExtractor(feature_size=128).to_dict(), indent=1, default=lambda a: None) + "\n")
    (OUT / "audio.json").write_text(json.dumps({"lengths": lengths, "resampled": len(resampled), "mels": mels}) + "\n")


main()
