"""What llama.cpp's converter writes for the tiny text checkpoints, for crates/models/tests/gguf.rs.

Its argument is a source tree of llama.cpp (such as `vendor/llama.cpp` of the source package of llama-cpp-python 0.3.36), whose
converter knows published tokenizers only: the name of the rule that cuts text into words is given to it.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "crates/models/tests/golden"
RUN = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "qwen2"
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def convert(llama_cpp, checkpoint, outtype):
    """Returns the metadata, and of each tensor type, shape and digest of its values in f32. Divisors of rotations are returned themselves."""
    from gguf import GGUFReader, dequantize

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/x.gguf"
        subprocess.run(
            [sys.executable, "-c", RUN, llama_cpp, f"{llama_cpp}/convert_hf_to_gguf.py", str(checkpoint), "--outfile", file, "--outtype", outtype],
            check=True,
        )
        reader = GGUFReader(file)
        metadata = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
        tensors = {
            t.name: [
                t.tensor_type.name, [int(n) for n in reversed(t.shape)],
                t.data.tolist() if t.name == "rope_freqs.weight"
                else hashlib.sha256(dequantize(t.data, t.tensor_type).astype("<f4").tobytes()).hexdigest(),
            ]
            for t in reader.tensors
        }
    return metadata, tensors


def main():
    llama_cpp = str(Path(sys.argv[1]).resolve())
    sys.path.insert(0, llama_cpp + "/gguf-py")
    out = {}
    for name in ("qwen2", "qwen3", "llama"):
        metadata, f16 = convert(llama_cpp, GOLDEN / "checkpoints" / name, "f16")
        _, q8_0 = convert(llama_cpp, GOLDEN / "checkpoints" / name, "q8_0")
        out[name] = dict(metadata=metadata, f16=f16, q8_0=q8_0)
    (GOLDEN / "gguf.json").write_text(json.dumps(out, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
