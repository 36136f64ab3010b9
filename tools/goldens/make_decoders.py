"""Tiny text-only decoders, Qwen3 and Llama, and what transformers computes with them. Writes golden/decoders."""

import copy
import shutil

import torch
from fixtures import OUT, gradients, greedy, randomise, save_tensors, write_json
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

DECODERS = OUT / "decoders"
GREEDY_TOKENS = 12
LENGTHS = (5, 1, 8)
SHARED = dict(vocab_size=96, num_hidden_layers=2, max_position_embeddings=256, torch_dtype="float32")
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
# Name: class of the configuration, class of the model, what config.json says, seed of a run whose greedy steps are clear.
MODELS = {
    # Heads wider than the stream's share, as published: 4 · 8 columns of queries over a stream of 20.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(
        model_type="qwen3", hidden_size=20, intermediate_size=28, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, rms_norm_eps=1e-6, rope_theta=1e6, attention_bias=False, tie_word_embeddings=True,
    ), 3),
    "llama": (LlamaConfig, LlamaForCausalLM, dict(
        model_type="llama", hidden_size=24, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=LLAMA3, attention_bias=False, mlp_bias=False,
        tie_word_embeddings=False,
    ), 5),
    # Biases in all four projections; as many key heads as query heads, since the file does not say how many.
    "llama_tied": (LlamaConfig, LlamaForCausalLM, dict(
        model_type="llama", hidden_size=24, intermediate_size=32, num_attention_heads=2, rms_norm_eps=1e-5,
        attention_bias=True, tie_word_embeddings=True,
    ), 11),
}


def write_checkpoint(name):
    config_class, model_class, own, seed = MODELS[name]
    raw = {**own, **SHARED}
    config = config_class(**copy.deepcopy({k: v for k, v in raw.items() if k not in ("model_type", "torch_dtype")}))
    torch.manual_seed(0)
    model = model_class._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model.named_parameters(), seed)
    directory = DECODERS / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    write_json(directory / "config.json", raw | {"architectures": [model_class.__name__]})
    loaded = model_class.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    for n, p in model.state_dict().items():
        assert torch.equal(p, loaded.state_dict()[n]), n
    return loaded


def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def main():
    generator = torch.Generator().manual_seed(23)
    draw = lambda n: torch.randint(0, SHARED["vocab_size"], (n,), generator=generator).tolist()
    prompt, completions = draw(43), [draw(n) for n in LENGTHS]
    coefficients = torch.randn(sum(LENGTHS), generator=generator)
    for name in MODELS:
        model = write_checkpoint(name)
        model.zero_grad(set_to_none=True)
        logps, entropies, out = [], [], {}
        for i, completion in enumerate(completions):
            logits = logits_of(model, prompt + completion)
            if i == 0:
                out["logits"] = logits
            log_softmax = logits[len(prompt) - 1 : -1].log_softmax(-1)
            logps.append(log_softmax.gather(1, torch.tensor(completion)[:, None])[:, 0])
            entropies.append(-(log_softmax.exp() * log_softmax).sum(-1))
        logp, entropy = torch.cat(logps), torch.cat(entropies)
        loss = (coefficients * logp).sum() + 0.5 * (coefficients.flip(0) * entropy).sum()
        loss.backward()
        tokens, margins = greedy(lambda tokens: logits_of(model, prompt + tokens)[-1], GREEDY_TOKENS)
        print(f"{name}: loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
        assert min(margins) > 1e-3 and len(set(tokens)) > 4, name
        out |= dict(
            prompt_ids=torch.tensor(prompt), completion_ids=torch.tensor(sum(completions, [])),
            lengths=torch.tensor(LENGTHS), dlogp=coefficients, dentropy=0.5 * coefficients.flip(0), logp=logp,
            entropy=entropy, greedy=torch.tensor(tokens),
        )
        out |= gradients(model, full=name == "qwen3")
        save_tensors(DECODERS / f"{name}.safetensors", out)


if __name__ == "__main__":
    main()
