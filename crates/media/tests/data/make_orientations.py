"""Writes `orientations.json`: small pictures in every format and place that can hold an orientation, and what
`ImageOps.exif_transpose` of Pillow 13.0 makes of them.

Each row has the file in base64, its stored size, and the SHA-256 of the turned pixels. JPEG files have flat grey blocks, which all
decoders give alike.

Run: python make_orientations.py   (needs numpy and pillow)
"""

import base64
import hashlib
import io
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageOps

HERE = Path(__file__).parent
assert PIL.__version__.startswith("13.0."), f"Pillow {PIL.__version__}: places of the tag are those of 13.0"

rng = np.random.default_rng(5)
rgb = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8))
rgba = Image.fromarray(rng.integers(0, 256, (5, 7, 4), dtype=np.uint8))
blocks = Image.fromarray(np.kron(rng.integers(0, 256, (3, 2), dtype=np.uint8), np.ones((8, 8), np.uint8)))
XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description {}</x:xmpmeta>'
attribute = lambda value: XMP.format(f'tiff:Orientation="{value}"/>').encode()
element = lambda value: XMP.format(f"><tiff:Orientation>{value}</tiff:Orientation></rdf:Description>").encode()


def saved(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def directory(entries, order="<", next_at=8, data=b""):
    """An EXIF block with one directory; entries are (tag, type, count, four bytes)."""
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", next_at)
    body = struct.pack(order + "H", len(entries)) + b"".join(struct.pack(order + "HHI", *e[:3]) + e[3] for e in entries)
    return head + body + struct.pack(order + "I", 0) + data


def block(value, order="<", kind=3, count=1):
    pack = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i"}[kind]
    inline = struct.pack(order + pack, value).ljust(4, b"\0")
    return directory([(0x010F, 2, 4, b"ab\0\0"), (0x0112, kind, count, inline)], order)


def jpeg(*segments, image=blocks):
    """A JPEG with segments APP1 after its start."""
    plain = saved(image, "JPEG", quality=95)
    return plain[:2] + b"".join(b"\xff\xe1" + struct.pack(">H", len(s) + 2) + s for s in segments) + plain[2:]


def png(*chunks, last=(), image=rgb):
    """A PNG with chunks before and behind its pixels."""
    join = lambda all: b"".join(struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in all)
    plain = saved(image, "PNG")
    return plain[:33] + join(chunks) + plain[33:-12] + join(last) + plain[-12:]


def webp(flags, *chunks, image=rgba):
    """A lossless WebP in the extended format with chunks behind its pixels."""
    plain = saved(image, "WEBP", lossless=True, exact=True)
    pixels = plain[plain.index(b"VP8L"):]
    width, height = image.size
    head = b"VP8X" + struct.pack("<I", 10) + bytes([flags | 0x10, 0, 0, 0]) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    join = lambda all: b"".join(t + struct.pack("<I", len(d)) + d + b"\0" * (len(d) % 2) for t, d in all)
    body = b"WEBP" + head + pixels + join(chunks)
    return b"RIFF" + struct.pack("<I", len(body)) + body


EXIF = b"Exif\0\0"
XAP = b"http://ns.adobe.com/xap/1.0/\0"
profile = lambda data: f"\nexif\n{len(data):8}\n{data.hex()}\n".encode()
itxt = lambda text, packed=0: (b"iTXt", b"XML:com.adobe.xmp\0" + bytes([packed, 0]) + b"\0\0" + (zlib.compress(text) if packed else text))
raw = b"Raw profile type exif\0"

files = {}
for value in range(0, 10):
    exif = Image.Exif()
    exif[0x0112] = value
    files[f"pillow {value}.jpg"] = saved(blocks, "JPEG", quality=95, exif=exif)
    files[f"pillow {value}.png"] = saved(rgb, "PNG", exif=exif)
    files[f"pillow rgba {value}.png"] = saved(rgba, "PNG", exif=exif)
    files[f"pillow {value}.webp"] = saved(rgba, "WEBP", lossless=True, exact=True, exif=exif)
    files[f"pillow {value}.tiff"] = saved(rgb, "TIFF", tiffinfo={0x0112: value})
    files[f"big-endian {value}.jpg"] = jpeg(EXIF + block(value, ">"))
    files[f"xmp {value}.jpg"] = jpeg(XAP + attribute(value))
    files[f"xmp {value}.png"] = png(itxt(element(value)))
    files[f"xmp {value}.webp"] = webp(4, (b"XMP ", attribute(value)))
    files[f"after the pixels {value}.png"] = png(last=[(b"eXIf", block(value))])
    files[f"zTXt {value}.png"] = png((b"zTXt", raw + b"\0" + zlib.compress(profile(EXIF + block(value)))))
    files[f"extended {value}.webp"] = webp(8, (b"EXIF", EXIF + block(value)))
files |= {
    "tEXt.png": png((b"tEXt", raw + profile(block(6)))),
    "packed iTXt.png": png(itxt(attribute(8), 1)),
    "exif beats xmp.jpg": jpeg(XAP + attribute(3), EXIF + block(6)),
    "exif without the tag.jpg": jpeg(EXIF + directory([(0x010F, 2, 4, b"ab\0\0")]), XAP + attribute(3)),
    "second xmp counts.jpg": jpeg(XAP + attribute(3), XAP + attribute(6)),
    "exif in two segments.jpg": jpeg(EXIF + block(6)[:20], EXIF + block(6)[20:]),
    "exif twice in front.jpg": jpeg(EXIF + EXIF + block(6)),
    "other segments.jpg": jpeg(b"Other\0", EXIF + block(7)),
    "long.jpg": jpeg(EXIF + block(6, kind=4)),
    "signed.jpg": jpeg(EXIF + block(6, ">", kind=9)),
    "signed byte.jpg": jpeg(EXIF + block(6, kind=6)),
    "byte.jpg": jpeg(EXIF + block(6, kind=1)),
    "byte hides xmp.jpg": jpeg(EXIF + block(6, kind=1), XAP + attribute(8)),
    "two values.jpg": jpeg(EXIF + block(6, count=2)),
    "negative.jpg": jpeg(EXIF + block(-6, kind=8)),
    "the first of two.jpg": jpeg(EXIF + directory([(0x0112, 3, 1, b"\6\0\0\0"), (0x0112, 3, 1, b"\3\0\0\0")])),
    "value beyond the end before it.jpg": jpeg(EXIF + directory([(0x010F, 2, 9, b"\xff\xff\0\0"), (0x0112, 3, 1, b"\6\0\0\0")])),
    "values larger than all before it.jpg": jpeg(EXIF + directory([(0x010F, 2, 400, b"\xff\xff\0\0"), (0x0112, 3, 1, b"\6\0\0\0")])),
    "unknown type before it.jpg": jpeg(EXIF + directory([(0x010F, 99, 400, b"\xff\xff\0\0"), (0x0112, 3, 1, b"\6\0\0\0")])),
    "cut directory.jpg": jpeg(EXIF + directory([(0x0112, 3, 1, b"\6\0\0\0")] * 3)[:30]),
    "padded markers.jpg": jpeg(EXIF + block(6)).replace(b"\xff\xe1", b"\xff\xff\xff\xe1", 1),
    "no flag.webp": webp(0, (b"EXIF", block(6))),
    "odd chunk.webp": webp(12, (b"XXXX", b"abc"), (b"XMP ", attribute(3)), (b"EXIF", directory([]) + b"a"), (b"EXIF", block(8))),
    "two exif.png": png((b"eXIf", block(3)), last=[(b"eXIf", block(6))]),
    "other method.png": png((b"iTXt", b"XML:com.adobe.xmp\0\1\1\0\0" + attribute(6))),
}

rows = []
for name, data in files.items():
    image = Image.open(io.BytesIO(data))
    stored = list(image.size)
    try:
        turned = ImageOps.exif_transpose(image)
    except Exception as error:  # Pillow fails on the tag; the pixels stay as they are stored.
        print(name, repr(error))
        turned = Image.open(io.BytesIO(data))
    if turned.mode == "RGBA":
        turned = Image.alpha_composite(Image.new("RGBA", turned.size, (255, 255, 255, 255)), turned)
    pixels = np.asarray(turned.convert("RGB"))
    rows.append(dict(name=name, file=base64.b64encode(data).decode(), stored=stored, turned=list(turned.size), sha256=hashlib.sha256(pixels.tobytes()).hexdigest()))
(HERE / "orientations.json").write_text(json.dumps(rows, indent=1) + "\n")
print(len(rows), "files")
