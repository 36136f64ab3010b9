"""GGUF files of the package `gguf`, with the values that it reads and writes, for crates/gguf/tests/values.rs.

Blocks of few bits are random bytes, with scales that are finite. Random numbers to write contain zeros, ties and small blocks.
"""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

OUT = Path(__file__).resolve().parents[2] / "crates/gguf/tests/data"
# Type, and the places of half-precision scales in a block.
TYPES = {
    Type.F32: [], Type.F16: [], Type.BF16: [], Type.Q8_0: [0], Type.Q5_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2],
    Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208],
}
ROWS = 3


def blocks(kind, random):
    """Random rows of two blocks, or of 96 values."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    if kind in (Type.F32, Type.F16):
        values = random.standard_normal((ROWS, 96)) * 10.0 ** random.integers(-6, 4, (ROWS, 96))
        return values.astype(np.float32 if kind == Type.F32 else np.float16)
    if kind == Type.BF16:
        return gguf.quants.quantize(random.standard_normal((ROWS, 96)).astype(np.float32), kind)
    raw = random.integers(0, 256, (ROWS, 2, num_bytes), dtype=np.uint8)
    for at in TYPES[kind]:
        scale = (random.standard_normal((ROWS, 2, 1)) * 10.0 ** random.integers(-7, 3, (ROWS, 2, 1))).astype(np.float16)
        raw[:, :, at : at + 2] = scale.view(np.uint8)
    return raw.reshape(ROWS, 2 * num_bytes)


def metadata(writer):
    """One key of each type."""
    writer.add_uint8("a.u8", 255)
    writer.add_int8("a.i8", -128)
    writer.add_uint16("a.u16", 65535)
    writer.add_int16("a.i16", -32768)
    writer.add_uint32("a.u32", 2**32 - 1)
    writer.add_int32("a.i32", -(2**31))
    writer.add_float32("a.f32", 1e-5)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "Grüße, 世界")
    writer.add_array("a.texts", ["a", "Ġb", ""])
    writer.add_array("a.integers", [1, -2, 3])
    writer.add_uint64("a.u64", 2**64 - 1)
    writer.add_int64("a.i64", -(2**63))
    writer.add_float64("a.f64", 0.1)


def write(name, tensors):
    path = OUT / name
    writer = gguf.GGUFWriter(path, "test")
    metadata(writer)
    for name, values, kind in tensors:
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(7)
    path = write("read.gguf", [
        (kind.name, blocks(kind, random), None if kind in (Type.F32, Type.F16) else kind) for kind in TYPES
    ])
    values = [gguf.dequantize(t.data, t.tensor_type).astype(np.float32) for t in gguf.GGUFReader(path).tensors]
    assert all(np.isfinite(v).all() for v in values)
    (OUT / "read.f32").write_bytes(b"".join(v.tobytes() for v in values))

    source = (random.standard_normal((5, 64)) * 10.0 ** random.integers(-3, 3, (5, 1))).astype(np.float32)
    source[0, :32] = 0
    # With a scale of 1, halves are ties. With a scale below the least number of half precision, it becomes 0.
    source[1, :32] = np.arange(32) / 2 - 8
    source[1, 0] = 127
    source[2, :32] = 1e-10 * np.arange(1, 33)
    source[3, 32:] = -65504
    write("written.gguf", [
        ("vector", source[0], None),
        ("f32", source[:, :33].copy(), None),
        ("f16", source[:, :33].astype(np.float16), None),
        ("q8_0", gguf.quantize(source, Type.Q8_0), Type.Q8_0),
    ])
    (OUT / "written.f32").write_bytes(source.tobytes())


if __name__ == "__main__":
    main()
