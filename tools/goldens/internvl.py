"""Tiny InternVL checkpoints in both layouts, and the model of the original layout written out in PyTorch.

The published code of the original layout is not needed: `Original` is an independent construction from the architecture, with
the published tensor names. It is compared with transformers' model of the hf layout on the same weights.
"""

import math

import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

# Vocabulary: 256 bytes, 40 merges, control tokens, ordinary added tokens; `<video>` exists in the hf layout only.
NUM_MERGES, VOCAB = 40, 320
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>"]
ADDED = ["<think>", "</think>", "<answer>", "</answer>"]
ID = {t: 256 + NUM_MERGES + i for i, t in enumerate(SPECIAL + ADDED + ["<video>"])}
EOT, IM_END, CONTEXT = ID["<|endoftext|>"], ID["<|im_end|>"], ID["<IMG_CONTEXT>"]

SIDE, PATCH, TOKENS_PER_TILE, MAX_TILES = 28, 7, 4, 4
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
HIDDEN, LAYERS, HEADS, KV_HEADS, INTER = 32, 2, 2, 1, 48
WIDTH, DEPTH, TOWER_HEADS, TOWER_INTER = 32, 2, 2, 48

# Width of a head of a Qwen3 language model: more than its share of the stream.
WIDE_HEAD = 24

# Experts of a mixture: their number, how many of them a row uses, the width of one.
EXPERTS, TOPK, EXPERT_INTER = 6, 2, 20

# name -> layout, tower with RMS and qk-norm (else layer norm and biases), tied head, language model, seed. The language model
# is Qwen2 (False), Qwen3 (True) or Qwen3 with experts ("moe").
CHECKPOINTS = {
    # Seeds: every greedy step of every case is decided clearly.
    "internvl_hf": ("hf", False, False, False, 45),
    "internvl_original": ("original", False, False, False, 45),
    "internvl_rms_hf": ("hf", True, True, False, 4),
    "internvl_rms_original": ("original", True, True, False, 4),
    "internvl3_5_hf": ("hf", False, False, True, 1),
    "internvl3_5_original": ("original", False, False, True, 1),
    "internvl3_5_moe_hf": ("hf", False, False, "moe", 1),
    "internvl3_5_moe_original": ("original", False, False, "moe", 1),
}
TEMPLATES = {
    "internvl_original": (
        "internvl2_5",
        "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。",
        "<|im_end|>\n",
    ),
    "internvl_rms_original": (
        "Hermes-2",
        "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。",
        "<|im_end|>",
    ),
}
TEMPLATES["internvl3_5_original"] = TEMPLATES["internvl3_5_moe_original"] = TEMPLATES["internvl_original"]


class RmsNorm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class TowerAttention(nn.Module):
    def __init__(self, rms):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=not rms)
        if rms:
            self.q_norm, self.k_norm = RmsNorm(WIDTH), RmsNorm(WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        n, t, _ = x.shape
        q, k, v = self.qkv(x).split(WIDTH, -1)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (z.view(n, t, TOWER_HEADS, -1).transpose(1, 2) for z in (q, k, v))
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(n, t, WIDTH))


class TowerMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, TOWER_INTER), nn.Linear(TOWER_INTER, WIDTH)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class TowerLayer(nn.Module):
    def __init__(self, rms):
        super().__init__()
        norm = (lambda: RmsNorm(WIDTH)) if rms else (lambda: nn.LayerNorm(WIDTH, eps=1e-6))
        self.norm1, self.norm2, self.attn, self.mlp = norm(), norm(), TowerAttention(rms), TowerMlp()
        self.ls1, self.ls2 = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        x = x + self.ls1 * self.attn(self.norm1(x))
        return x + self.ls2 * self.mlp(self.norm2(x))


class TowerEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.class_embedding = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.position_embedding = nn.Parameter(torch.zeros(1, 1 + (SIDE // PATCH) ** 2, WIDTH))
        self.patch_embedding = nn.Conv2d(3, WIDTH, PATCH, PATCH)

    def forward(self, pixels):
        x = self.patch_embedding(pixels)
        n, _, h, w = x.shape
        grid = math.isqrt(self.position_embedding.shape[1] - 1)
        positions = self.position_embedding
        if (h, w) != (grid, grid):
            plane = positions[:, 1:].reshape(1, grid, grid, -1).permute(0, 3, 1, 2)
            plane = F.interpolate(plane, size=(h, w), mode="bicubic", align_corners=False)
            positions = torch.cat([positions[:, :1], plane.flatten(2).transpose(1, 2)], 1)
        x = torch.cat([self.class_embedding.expand(n, 1, -1), x.flatten(2).transpose(1, 2)], 1)
        return x + positions


class Tower(nn.Module):
    def __init__(self, rms):
        super().__init__()
        self.embeddings = TowerEmbeddings()
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(TowerLayer(rms) for _ in range(DEPTH))

    def forward(self, pixels):
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return x[:, 1:]


def rotate(x, angles):
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * angles.cos() + turned * angles.sin()


class Attention(nn.Module):
    def __init__(self, qwen3):
        super().__init__()
        self.head = head = WIDE_HEAD if qwen3 else HIDDEN // HEADS
        self.q_proj = nn.Linear(HIDDEN, HEADS * head, bias=not qwen3)
        self.k_proj, self.v_proj = (nn.Linear(HIDDEN, KV_HEADS * head, bias=not qwen3) for _ in range(2))
        self.o_proj = nn.Linear(HEADS * head, HIDDEN, bias=False)
        if qwen3:
            self.q_norm, self.k_norm = RmsNorm(head), RmsNorm(head)

    def forward(self, x):
        t, head = x.shape[0], self.head
        frequencies = 1.0 / 1e6 ** (torch.arange(0, head, 2, dtype=x.dtype) / head)
        angles = torch.arange(t, dtype=x.dtype)[:, None] * frequencies
        angles = torch.cat([angles, angles], -1)
        q, k, v = (f(x).view(t, -1, head).transpose(0, 1) for f in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = (z.repeat_interleave(HEADS // KV_HEADS, 0) for z in (k, v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(head)
        scores = scores + torch.full((t, t), float("-inf")).to(x.dtype).triu(1)
        return self.o_proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(t, HEADS * head))


class GatedMlp(nn.Module):
    def __init__(self, inter=INTER):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, inter, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inter, HIDDEN, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """Experts, weighted by the softmax over all of them, divided by the sum over the chosen ones."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(GatedMlp(EXPERT_INTER) for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(TOPK, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        rows = [sum(w * self.experts[e](row) for w, e in zip(ws, es)) for row, ws, es in zip(x, weights, chosen.tolist())]
        return torch.stack(rows)


def fused(tensors):
    """Tensors by name, the layers of all experts of a block as one: [e, h, 2i] and [e, i, h]."""
    out = {}
    for name, tensor in tensors.items():
        start, at, end = name.partition(".experts.")
        if not at:
            out[name] = tensor
        elif end.startswith("0.down_proj"):
            parts = [tensors[f"{start}.experts.{e}.down_proj.weight"].T for e in range(EXPERTS)]
            out[f"{start}.experts.down_proj"] = torch.stack(parts)
        elif end.startswith("0.gate_proj"):
            both = lambda e: [tensors[f"{start}.experts.{e}.{part}_proj.weight"].T for part in ("gate", "up")]
            out[f"{start}.experts.gate_up_proj"] = torch.stack([torch.cat(both(e), 1) for e in range(EXPERTS)])
    return out


class DecoderLayer(nn.Module):
    def __init__(self, qwen3):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RmsNorm(HIDDEN), RmsNorm(HIDDEN)
        self.self_attn, self.mlp = Attention(qwen3), Mixture() if qwen3 == "moe" else GatedMlp()

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Original(nn.Module):
    """InternVLChatModel with a Qwen2 or Qwen3 language model; one sequence at a time."""

    def __init__(self, rms, tied, qwen3):
        super().__init__()
        self.vision_model = Tower(rms)
        self.mlp1 = nn.Sequential(
            nn.LayerNorm(4 * WIDTH), nn.Linear(4 * WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN)
        )
        self.language_model = nn.Module()
        self.language_model.model = decoder = nn.Module()
        decoder.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        decoder.layers = nn.ModuleList(DecoderLayer(qwen3) for _ in range(LAYERS))
        decoder.norm = RmsNorm(HIDDEN)
        self.language_model.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if tied:
            self.language_model.lm_head.weight = decoder.embed_tokens.weight

    def features(self, pixels):
        """[n, 3, side, side] -> [n * tokens, HIDDEN]; a token is a square of 2x2 patches."""
        x = self.vision_model(pixels)
        n, t, c = x.shape
        g = math.isqrt(t)
        x = x.view(n, g // 2, 2, g // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n * t // 4, 4 * c)
        return self.mlp1(x)

    def forward(self, ids, pixels):
        """Logits [len(ids), VOCAB]."""
        decoder = self.language_model.model
        ids = torch.tensor(ids)
        x = decoder.embed_tokens(ids)
        if pixels is not None:
            features = self.features(pixels)
            assert int((ids == CONTEXT).sum()) == len(features)
            x = x.masked_scatter((ids == CONTEXT)[:, None], features)
        for layer in decoder.layers:
            x = layer(x)
        return self.language_model.lm_head(decoder.norm(x))


def hf_names(name):
    """Original tensor name -> names in the published hf layout (three for a fused projection)."""
    name = name.replace("vision_model.", "vision_tower.").replace(".encoder.layers.", ".encoder.layer.")
    for old, new in (
        ("class_embedding", "cls_token"), ("position_embedding", "position_embeddings"),
        ("patch_embedding.", "patch_embeddings.projection."), (".norm1.", ".layernorm_before."),
        (".norm2.", ".layernorm_after."), (".ls1", ".lambda_1"), (".ls2", ".lambda_2"),
        (".attn.proj.", ".attention.projection_layer."), (".attn.q_norm.", ".attention.q_norm."),
        (".attn.k_norm.", ".attention.k_norm."), ("mlp1.0.", "multi_modal_projector.layer_norm."),
        ("mlp1.1.", "multi_modal_projector.linear_1."), ("mlp1.3.", "multi_modal_projector.linear_2."),
    ):
        name = name.replace(old, new)
    if ".attn.qkv." in name:
        return [name.replace("attn.qkv", f"attention.{part}_proj") for part in "qkv"]
    return [name]


def to_hf(tensors):
    out = {}
    for name, tensor in tensors.items():
        names = hf_names(name)
        for new, part in zip(names, tensor.chunk(len(names), 0) if len(names) > 1 else [tensor]):
            out[new] = part.contiguous()
    return out


def new_original(rms, tied, qwen3, seed):
    """Random weights with a useful spread: no bias is 0, no norm weight and no scale is 1."""
    model = Original(rms, tied, qwen3).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("bias"):
                p.copy_(0.1 * noise)
            elif name.endswith(("ls1", "ls2")):
                p.copy_(0.6 + 0.2 * noise)
            elif p.dim() == 1:
                p.copy_(1.0 + 0.2 * noise)
            elif p.dim() == 3:
                p.copy_(0.5 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                p.copy_(0.35 * noise)
            else:
                loud = name.endswith(("o_proj.weight", "down_proj.weight"))
                gain = (1.5 if "mlp1" in name else 0.9) if "language" not in name else (2.5 if loud else 1.2)
                p.copy_(noise * (gain / math.sqrt(p[0].numel())))
    return model


# ---------------------------------------------------------------------------------------------------------- pictures


def arrangement(width, height, side, least, most):
    """The published choice of (columns, rows), written down from its rule."""
    ratio, best, nearest = width / height, (1, 1), float("inf")
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    for c, r in sorted(grids, key=lambda g: g[0] * g[1]):
        distance = abs(ratio - c / r)
        if distance < nearest or (distance == nearest and width * height > 0.5 * side * side * c * r):
            best, nearest = (c, r), distance
    return best


def tiles_u8(image, most=MAX_TILES, side=SIDE):
    """A picture as tiles, [n, 3, side, side] u8: row by row, the whole picture last."""
    columns, rows = arrangement(*image.size, side, 1, most)
    canvas = image.resize((columns * side, rows * side), Image.Resampling.BICUBIC)
    tiles = [
        canvas.crop((c * side, r * side, (c + 1) * side, (r + 1) * side)) for r in range(rows) for c in range(columns)
    ]
    if len(tiles) > 1:
        tiles.append(image.resize((side, side), Image.Resampling.BICUBIC))
    return torch.stack([torch.frombuffer(bytearray(t.tobytes()), dtype=torch.uint8).view(side, side, 3) for t in tiles]) \
        .permute(0, 3, 1, 2).contiguous()


def normalise(u8):
    mean, std = (torch.tensor(x).view(1, 3, 1, 1) for x in (MEAN, STD))
    return ((u8.double() * (1 / 255)).float() - mean) / std
