"""Compares the greedy text of llama.cpp with that of omnigrpo: 64 tokens after each of 20 prompts, with F16 and Q8_0 files.

usage: compare_llama_cpp.py OMNIGRPO CHECKPOINT WORK_DIR      (needs llama-cpp-python, gguf, jinja2 and numpy)

Both programs have the weights of the exported file: omnigrpo computes in float32 with the checkpoint that `convert` makes of it. After a
token that differs, texts are not compared any more; the two best logits must then differ by less than the limit.

llama.cpp rounds the inputs of products to the type of the weights. With Q8_0 these are 8 bits, which moves logits by tenths. So the limit
holds for a copy of that file with the same values in F32, and the text of the file itself is only reported.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

NEAR = 1e-2
TOKENS = 64
PROMPTS = [
    "What is the capital of France?", "Name three colours.", "What is 3 + 4? Reply with the number only.",
    "Write a short poem about the sea.", "Explain what a prime number is.", "Translate to German: good morning.",
    "List the planets of the solar system.", "Why is the sky blue?", "Give me a recipe for pancakes.",
    "What does the word 'ephemeral' mean?", "Write a Python function that reverses a string.",
    "Who wrote Romeo and Juliet?", "How many days has a leap year?", "Tell me a fact about octopuses.",
    "Summarise: the cat sat on the mat because it was warm.", "What is 12 * 12?", "Grüße! Wie heißt du?",
    "世界で一番高い山は何ですか？", "Is this a question: 'You went home'?", "Count from 1 to 10 \N{GRINNING FACE}",
]


def run(program, *args):
    done = subprocess.run([program, *map(str, args)], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, args))}\n{done.stdout}{done.stderr}")


def rows_of(program, checkpoint, work):
    rows = work / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"id": f"p{i}", "problem": p}, ensure_ascii=False) + "\n" for i, p in enumerate(PROMPTS)))
    out = work / "greedy.jsonl"
    run(program, "generate", "--model_name_or_path", checkpoint, "--input", rows, "--output", out, "--temperature", 0,
        "--max_completion_length", TOKENS, "--torch_dtype", "float32", "--num_generations", 1)
    return [json.loads(line) for line in out.read_text().splitlines()]


def compare(file, rows, template):
    """Returns the number of equal texts, of near ties, and the differences."""
    model = llama_cpp.Llama(str(file), n_ctx=1024, logits_all=False, verbose=False, n_threads=1)
    equal, ties, different = 0, 0, []
    for prompt, row in zip(PROMPTS, rows):
        ids = model.tokenize(template(prompt).encode(), add_bos=False, special=True)
        if len(ids) != row["prompt_tokens"]:
            different.append((prompt, f"{len(ids)} tokens, omnigrpo has {row['prompt_tokens']}"))
            continue
        model.reset()
        model.eval(ids)
        for i, token in enumerate(row["completions"][0]["completion_ids"]):
            # A context keeps the logits of the last token only.
            logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits(model.ctx), shape=(model.n_vocab(),))
            best = int(logits.argmax())
            if best != token:
                gap = float(logits[best] - logits[token])
                if gap < NEAR:
                    ties += 1
                else:
                    different.append((prompt, f"token {i}: {best} is {gap:.4f} above {token}"))
                break
            model.eval([token])
        else:
            equal += 1
    return equal, ties, different


def widened(file, to):
    """Writes a copy of a file whose values are in F32."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            kind, *inner = field.types
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner[-1] if inner else None)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return to


def main():
    program, checkpoint, work = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    work.mkdir(parents=True, exist_ok=True)
    from jinja2 import Environment

    source = (checkpoint / "chat_template.jinja").read_text()
    rendered = Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)

    def template(prompt):
        return rendered.render(messages=[{"role": "user", "content": prompt}], add_generation_prompt=True)

    failed = False
    for outtype in ("f16", "q8_0"):
        file, back = work / outtype, work / f"{outtype}-back"
        for directory in (file, back):
            shutil.rmtree(directory, ignore_errors=True)
        run(program, "export", "--model_name_or_path", checkpoint, "--format", "gguf", "--outtype", outtype, "--output_dir", file)
        run(program, "convert", file / "model.gguf", back)
        rows, path = rows_of(program, back, work), file / "model.gguf"
        files = [(outtype, path, outtype == "f16")]
        if outtype == "q8_0":
            files.append(("q8_0, values in f32", widened(path, file / "wide.gguf"), True))
        for name, path, limited in files:
            equal, ties, different = compare(path, rows, template)
            print(f"{name}: {equal} of {len(PROMPTS)} texts of {TOKENS} tokens are equal, {ties} part at a near tie, {len(different)} differ", flush=True)
            for prompt, what in different:
                print(f"  {prompt!r}: {what}")
            failed |= limited and bool(different)
    sys.exit(failed)


if __name__ == "__main__":
    main()
