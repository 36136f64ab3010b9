"""Tiny models that read text only (Qwen2, Qwen3 with and without experts, Llama), and what transformers computes with them on case B."""

import copy
import shutil

import torch
from fixtures import ADDED, CHECKPOINTS, EOT, ID, IM_END, OUT, SPECIAL, VOCAB, gradients, greedy, randomise, save_tensors, write_json
from make_checkpoints import build_tokenizer, tokenizer_config
from make_decoders import logits_of
from safetensors.torch import load_file
from transformers import (
    LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM,
    Qwen3MoeConfig, Qwen3MoeForCausalLM,
)

CASES = OUT / "cases"
SHARED = dict(
    attention_dropout=0.0, bos_token_id=EOT, eos_token_id=IM_END, hidden_act="silu", initializer_range=0.02, intermediate_size=64, max_position_embeddings=512, num_hidden_layers=2,
    torch_dtype="float32", use_cache=True, vocab_size=VOCAB,
)
# Windows are off, as in Qwen's files.
WINDOWS = dict(max_window_layers=2, sliding_window=32768, use_sliding_window=False)
YARN = dict(type="yarn", factor=8.0, original_max_position_embeddings=64)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
# Name: class of the configuration, class of the model, what config.json says, seed of a run whose greedy steps are clear.
MODELS = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, dict(
        model_type="qwen2", hidden_size=32, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_theta=1e6,
        rope_scaling=YARN, tie_word_embeddings=False, **WINDOWS,
    ), 1),
    # Heads wider than the stream's share, and the list of layers that transformers 5 writes.
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, dict(
        model_type="qwen3", hidden_size=32, attention_bias=False, head_dim=16, layer_types=["full_attention"] * 2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6,
        tie_word_embeddings=True, **WINDOWS,
    ), 1),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM, dict(
        model_type="qwen3_moe", hidden_size=32, attention_bias=False, decoder_sparse_step=1, head_dim=16, mlp_only_layers=[],
        moe_intermediate_size=20, norm_topk_prob=True, num_attention_heads=4, num_experts=9, num_experts_per_tok=2,
        num_key_value_heads=2, output_router_logits=False, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1e6,
        router_aux_loss_coef=0.001, tie_word_embeddings=True, **WINDOWS,
    ), 13),
    # Three key heads, as SmolLM2-135M.
    "llama": (LlamaConfig, LlamaForCausalLM, dict(
        model_type="llama", hidden_size=96, attention_bias=False, head_dim=16, mlp_bias=False, num_attention_heads=6,
        num_key_value_heads=3, pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=LLAMA3, rope_theta=5e5,
        tie_word_embeddings=True,
    ), 1),
}

# Written for this project, after the structure of published ones: ChatML, with the thinking of Qwen3 or without.
MESSAGES = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
)
END = "{%- endif -%}"
NO_THINKING = "{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
TEMPLATES = {"qwen2": MESSAGES + END, "qwen3": MESSAGES + NO_THINKING + END, "llama": MESSAGES + END}
TEMPLATES["qwen3_moe"] = TEMPLATES["qwen3"]


def write_checkpoint(name):
    config_class, model_class, own, seed = MODELS[name]
    raw = {k: v for k, v in {**SHARED, **own}.items() if k not in ("model_type", "torch_dtype")}
    torch.manual_seed(0)
    model = model_class._from_config(config_class(**copy.deepcopy(raw)), attn_implementation="eager", dtype=torch.float32).eval()
    randomise(model.named_parameters(), seed)
    directory = CHECKPOINTS / name
    shutil.rmtree(directory, ignore_errors=True)
    model.save_pretrained(directory)
    write_json(directory / "config.json", {"architectures": [model_class.__name__]} | SHARED | own)
    build_tokenizer().save(str(directory / "tokenizer.json"), pretty=False)
    write_json(directory / "tokenizer_config.json", tokenizer_config(with_template=False))
    (directory / "chat_template.jinja").write_text(TEMPLATES[name])
    write_json(directory / "generation_config.json", dict(
        bos_token_id=EOT, pad_token_id=EOT, do_sample=True, eos_token_id=[IM_END, EOT], temperature=0.6, top_p=0.95,
    ))
    loaded = model_class.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()
    for n, p in model.state_dict().items():
        assert torch.equal(p, loaded.state_dict()[n]), n
    return loaded


def main():
    inputs = load_file(CASES / "B.safetensors")
    prompt, completion = inputs["prompt_ids"].tolist(), inputs["completion_ids"].tolist()
    control = {ID[t] for t in SPECIAL + ADDED}
    for name in MODELS:
        model = write_checkpoint(name)
        model.zero_grad(set_to_none=True)
        logits = logits_of(model, prompt + completion)
        logp = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        loss = (inputs["coefficients"] * logp).sum()
        loss.backward()
        out = dict(
            position_ids=torch.arange(len(prompt)).expand(3, -1), logits=logits[::8], logp=logp, loss=loss.reshape(1),
            **gradients(model, full=False),
        )
        tokens, margins = greedy(lambda tokens: logits_of(model, prompt + tokens)[-1], GREEDY_TOKENS)
        print(f"{name}: L={len(prompt)} loss={float(loss.detach()):.3f} min margin={min(margins):.4f} {tokens}")
        assert min(margins) > 1e-3 and len(set(tokens)) > 4 and not control & set(tokens), name
        assert max(tokens) <= max(control), name
        save_tensors(CASES / f"B.{name}.safetensors", out | {"greedy": torch.tensor(tokens)})


if __name__ == "__main__":
    main()
