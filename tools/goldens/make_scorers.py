"""Tiny checkpoints of the scorers with tokenizers of the published kinds, and what transformers, bert_score and torch
make of them. Written to crates/scorers/tests/golden.

`pip install bert-score==0.3.13` besides requirements.txt; the computation here is independent of it and asserted equal.
"""

import json
import math
import shutil

import torch
import torch.nn.functional as F
from fixtures import MEDIA, OUT, open_rgb, save_tensors, write_json
from make_encoders import eager
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoTokenizer, BertConfig, BertModel, BertTokenizer, CLIPConfig, CLIPModel, CLIPTokenizer,
    DistilBertConfig, DistilBertModel, PhobertTokenizer, RobertaConfig, RobertaForMaskedLM, RobertaTokenizer, XLMRobertaConfig,
    XLMRobertaModel, XLMRobertaTokenizer,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

GOLDEN = OUT.parents[2] / "scorers/tests/golden"
PROJECTION = 10

TEXTS = [
    "trong ảnh có một vòi sen", "cô ấy đang mỉm cười với máy ảnh", "A cat, on THE  mat!", "it's 42° in here",
    "con mèo", "một con mèo nằm trên ghế và một con chó nằm dưới ghế trong ảnh",
]
PICTURES = ["noise.png", "shapes.png", "alpha.png"]


def save(directory, model, config, keep=lambda name: name):
    weights = {keep(n): p for n, p in model.state_dict().items() if keep(n)}
    save_tensors(directory / "model.safetensors", weights, format="pt")
    write_json(directory / "config.json", config)


def save_tokenizer(directory, tokenizer):
    tokenizer.save_pretrained(directory)
    # Compact: the pretty form is three times as long.
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), ensure_ascii=False, separators=(",", ":")) + "\n")


def alphabet():
    return sorted(ByteLevel.alphabet())


def clip():
    directory = GOLDEN / "clip"
    pieces = alphabet() + [c + "</w>" for c in alphabet()]
    merges = [("t", "h"), ("th", "e</w>"), ("c", "o"), ("co", "n</w>"), ("i", "n</w>"), ("a", "t</w>")]
    pieces += ["".join(m) for m in merges] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {p: i for i, p in enumerate(pieces)}
    vision = dict(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2, image_size=32, patch_size=8
    )
    text = dict(
        hidden_size=12, intermediate_size=20, num_attention_heads=3, num_hidden_layers=2, vocab_size=len(vocab),
        max_position_embeddings=40, eos_token_id=2,
    )
    config = dict(model_type="clip", projection_dim=PROJECTION, vision_config=vision, text_config=text)
    # A seed whose cosines lie below, inside and above the range that the reward maps to 0..1.
    model = eager(CLIPModel, CLIPConfig(**config), 39)
    save(directory, model, config)
    # Not `model_max_length`, which the published files have: the model's own limit counts.
    tokenizer = CLIPTokenizer(vocab=vocab, merges=merges)
    save_tokenizer(directory, tokenizer)
    processor = dict(
        crop_size=32, do_center_crop=True, do_normalize=True, do_resize=True, resample=3, size=32,
        image_mean=[0.48145466, 0.4578275, 0.40821073], image_std=[0.26862954, 0.26130258, 0.27577711],
    )
    write_json(directory / "preprocessor_config.json", processor)
    pil = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pixels = pil([open_rgb(MEDIA / name) for name in PICTURES], return_tensors="pt")["pixel_values"].float()
    encoded = tokenizer(TEXTS, padding=True, truncation=True, max_length=40, return_tensors="pt")
    assert encoded["attention_mask"].sum(1).max() == 40, "one text is cut"
    with torch.no_grad():
        pictures = model.get_image_features(pixel_values=pixels).pooler_output
        texts = model.get_text_features(**encoded).pooler_output
    save_tensors(GOLDEN / "clip.safetensors", {"pixels": pixels})
    rows = zip(encoded["input_ids"].tolist(), encoded["attention_mask"].tolist())
    ids = [[i for i, m in zip(*row) if m] for row in rows]
    return pictures, dict(ids=ids, cosines=cosines(texts, pictures))


def cosines(texts, pictures):
    return (F.normalize(texts, dim=-1) @ F.normalize(pictures, dim=-1).T).tolist()


def xlmr_tokenizer():
    characters = sorted(set("".join(TEXTS).lower().replace(" ", "")))
    words = ["▁một", "▁con", "▁mèo", "▁trong", "▁ảnh", "▁the", "▁nằm"]
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(c, -5.0) for c in characters] + [(w, -4.0 - 0.1 * i) for i, w in enumerate(words)] + [("<mask>", 0.0)]
    return XLMRobertaTokenizer(vocab=pieces)


def sentence_transformer(name, model, config, tokenizer, pooling, max_tokens, pictures, key):
    """The layout of sentence-transformers: a transformer in the root, pooling, a dense layer."""
    directory = GOLDEN / name
    save(directory, model, config, lambda n: None if "pooler" in n else n)
    save_tokenizer(directory, tokenizer)
    generator = torch.Generator().manual_seed(33)
    weight = torch.randn(PROJECTION, 16, generator=generator) / 4
    bias = 0.3 * torch.randn(PROJECTION, generator=generator)
    save_tensors(directory / "2_Dense/model.safetensors", {"linear.weight": weight, "linear.bias": bias})
    activation = "torch.nn.modules.activation.Tanh" if key == "cls" else "torch.nn.modules.linear.Identity"
    write_json(
        directory / "2_Dense/config.json",
        dict(in_features=16, out_features=PROJECTION, bias=True, activation_function=activation),
    )
    write_json(directory / "1_Pooling/config.json", pooling)
    write_json(directory / "sentence_bert_config.json", dict(max_seq_length=max_tokens, do_lower_case=False))
    write_json(
        directory / "modules.json",
        [
            dict(idx=0, name="0", path="", type="sentence_transformers.models.Transformer"),
            dict(idx=1, name="1", path="1_Pooling", type="sentence_transformers.models.Pooling"),
            dict(idx=2, name="2", path="2_Dense", type="sentence_transformers.models.Dense"),
        ],
    )
    encoded = tokenizer(TEXTS, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt")
    encoded.pop("token_type_ids", None)
    assert encoded["attention_mask"].sum(1).max() == max_tokens, "one text is cut"
    mask = encoded["attention_mask"][..., None].float()
    with torch.no_grad():
        hidden = model(**encoded).last_hidden_state
    pooled = hidden[:, 0] if key == "cls" else (hidden * mask).sum(1) / mask.sum(1)
    out = pooled @ weight.T + bias
    return dict(cosines=cosines(torch.tanh(out) if key == "cls" else out, pictures))


def multilingual(pictures):
    tokenizer = xlmr_tokenizer()
    config = dict(
        model_type="xlm-roberta", hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2,
        vocab_size=len(tokenizer), max_position_embeddings=64, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1,
    )
    model = eager(XLMRobertaModel, XLMRobertaConfig(**config), 32)
    pooling = dict(
        word_embedding_dimension=16, pooling_mode_cls_token=False, pooling_mode_mean_tokens=True,
        pooling_mode_max_tokens=False, pooling_mode_mean_sqrt_len_tokens=False,
    )
    return sentence_transformer("multilingual", model, config, tokenizer, pooling, 24, pictures, "mean")


def distil(pictures):
    tokenizer = bert_tokenizer()
    config = dict(
        model_type="distilbert", dim=16, hidden_dim=24, n_layers=2, n_heads=2, vocab_size=len(tokenizer),
        max_position_embeddings=64, activation="gelu", pad_token_id=0,
    )
    model = eager(DistilBertModel, DistilBertConfig(**config), 34)
    return sentence_transformer("distil", model, config, tokenizer, dict(pooling_mode="cls"), 20, pictures, "cls")


def bert_tokenizer():
    characters = sorted(set("".join(TEXTS).lower().replace(" ", "")) | set("abcdefghijklmnopqrstuvwxyz0123456789"))
    # Without accents too, since lower-casing strips them.
    normalizer = BertTokenizer(vocab={"[UNK]": 0}).backend_tokenizer.normalizer
    plain = set(normalizer.normalize_str("".join(TEXTS)).replace(" ", ""))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] + sorted(set(characters) | plain)
    pieces += ["##" + p for p in pieces[5:]] + ["con", "meo", "anh", "the", "mot", "nam", "##ng"]
    return BertTokenizer(vocab={p: i for i, p in enumerate(pieces)})


def bert():
    """A directory whose tokenizer is `vocab.txt` alone, as old ones are."""
    directory = GOLDEN / "bert"
    tokenizer = bert_tokenizer()
    config = dict(
        model_type="bert", hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=2,
        vocab_size=len(tokenizer), max_position_embeddings=64,
    )
    model = eager(BertModel, BertConfig(**config), 35)
    save(directory, model, config)
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    (directory / "vocab.txt").write_text("".join(f"{p}\n" for p, _ in vocab))
    write_json(directory / "tokenizer_config.json", dict(do_lower_case=True, model_max_length=512))
    cased = BertTokenizer(vocab=tokenizer.get_vocab(), do_lower_case=False)
    return dict(
        ids=[tokenizer(t)["input_ids"] for t in TEXTS], cased_ids=[cased(t)["input_ids"] for t in TEXTS],
    ), model, tokenizer


def roberta():
    directory = GOLDEN / "roberta"
    merges = [("c", "o"), ("co", "n"), ("Ġ", "m"), ("i", "n")]
    pieces = ["<s>", "<pad>", "</s>", "<unk>"] + alphabet()
    pieces += ["".join(m) for m in merges] + ["<mask>"]
    vocab = {p: i for i, p in enumerate(pieces)}
    tokenizer = RobertaTokenizer(vocab=vocab, merges=merges, model_max_length=58)
    config = dict(
        model_type="roberta", hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=3,
        vocab_size=len(tokenizer), max_position_embeddings=60, type_vocab_size=1, layer_norm_eps=1e-5, pad_token_id=1,
    )
    model = eager(RobertaForMaskedLM, RobertaConfig(**config), 36)
    save(directory, model, config, lambda n: None if n.startswith("lm_head.decoder") else n)
    save_tokenizer(directory, tokenizer)
    return model.roberta, tokenizer


def phobert():
    """PhoBERT's tokenizer: byte pairs over characters in files of its own, here without some of the parts that merging
    makes, and with no `Ơ`."""
    directory = GOLDEN / "phobert"
    directory.mkdir(parents=True)
    ends = sorted({c for text in TEXTS for word in text.split() for c in word})
    merges = [
        ("o", "n</w>"), ("c", "on</w>"), ("m", "ộ"), ("mộ", "t</w>"), ("è", "o</w>"), ("n", "h</w>"), ("t", "r"),
        ("tr", "on"), ("o", "n"), ("s", "e"), ("se", "n</w>"), ("v", "ò"), ("vò", "i</w>"), ("ò", "i</w>"),
    ]
    spell = lambda part: part.removesuffix("</w>") if part.endswith("</w>") else part + "@@"
    pieces = [c + "@@" for c in ends] + ends + [spell("".join(m)) for m in merges if "".join(m) not in ("mộ", "èo</w>")]
    (directory / "vocab.txt").write_text("".join(f"{p} {900 - i}\n" for i, p in enumerate(pieces)))
    (directory / "bpe.codes").write_text("".join(f"{a} {b} {900 - i}\n" for i, (a, b) in enumerate(merges)))
    write_json(directory / "tokenizer_config.json", dict(tokenizer_class="PhobertTokenizer", model_max_length=256))
    tokenizer = PhobertTokenizer(str(directory / "vocab.txt"), str(directory / "bpe.codes"))
    texts = TEXTS + ["vòi_sen\ncon mèo", "Ơ một m Ơm", "  mộ  mộm ", "", "n\n\nn"]
    ids = [tokenizer(t)["input_ids"] for t in texts]
    assert any(tokenizer.unk_token_id in row for row in ids)
    return dict(texts=texts, ids=ids)


CANDIDATES = ["trong ảnh có vòi sen", "con mèo nằm trên ghế", "con mèo", "it's a mat", TEXTS[5] + " " + TEXTS[5], "một"]
REFERENCES = [
    ["trong ảnh có một vòi sen"], ["một con mèo nằm trên ghế", "con chó nằm dưới ghế", "ghế"], ["con mèo"],
    ["A cat, on THE mat!", "it's 42° in here"], [TEXTS[5]], ["con mèo", "một"],
]


def bertscores(model, tokenizer, layer, idf, limit):
    """P, R, F1 per candidate, the best reference by each; from arXiv 1904.09675, eq. 1 and section 3."""
    flat = [r for refs in REFERENCES for r in refs]

    def encode(text):
        ids = tokenizer(text, truncation=True, max_length=limit)["input_ids"]
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[layer][0]
        return ids, F.normalize(hidden, dim=-1)

    documents = [set(encode(t)[0]) for t in flat]

    def weight(i):
        if idf:
            return math.log((len(flat) + 1) / (sum(i in d for d in documents) + 1))
        return 0.0 if i in (tokenizer.cls_token_id, tokenizer.sep_token_id) else 1.0

    out = []
    for candidate, references in zip(CANDIDATES, REFERENCES):
        c_ids, c = encode(candidate)
        rows = []
        for reference in references:
            r_ids, r = encode(reference)
            similarity = c @ r.T
            wc, wr = (torch.tensor([weight(i) for i in ids]) for ids in (c_ids, r_ids))
            p = float((similarity.max(1).values * wc).sum() / wc.sum())
            q = float((similarity.max(0).values * wr).sum() / wr.sum())
            rows.append((p, q, 2 * p * q / (p + q)))
        out.append([max(column) for column in zip(*rows)])
    return out


def check_bert_score(directory, layer, idf, ours):
    """The package on the same directory."""
    import bert_score

    with torch.no_grad():
        p, r, f = bert_score.score(
            CANDIDATES, REFERENCES, model_type=str(directory), num_layers=layer, idf=idf, use_fast_tokenizer=True,
            batch_size=1,
        )
    package = torch.stack([p, r, f], dim=1)
    delta = (package - torch.tensor(ours)).abs().max().item()
    assert delta < 1e-5, f"bert_score differs by {delta}"
    print(f"bert_score agrees to {delta:.1e} (layer {layer}, idf {idf})")


def main():
    if GOLDEN.exists():
        shutil.rmtree(GOLDEN)
    pictures, clip_results = clip()
    goldens = dict(texts=TEXTS, pictures=PICTURES, clip=clip_results, multilingual=multilingual(pictures))
    goldens["distil"] = distil(pictures)
    goldens["bert"], bert_model, bert_tok = bert()
    model, tokenizer = roberta()
    xlmr = AutoTokenizer.from_pretrained(GOLDEN / "multilingual")
    goldens["multilingual"]["ids"] = [xlmr(t)["input_ids"] for t in TEXTS]
    goldens["roberta"] = dict(ids=[tokenizer(t)["input_ids"] for t in TEXTS])
    goldens["phobert"] = phobert()
    cases = []
    # bert_score cuts a model of n layers after the one asked for.
    for name, m, tok, layer, idf, limit in [
        ("roberta", model, tokenizer, 3, False, 58), ("roberta", model, tokenizer, 2, False, 58),
        ("roberta", model, tokenizer, 3, True, 58), ("bert", bert_model, bert_tok, 2, False, 64),
    ]:
        scores = bertscores(m, tok, layer, idf, limit)
        cases.append(dict(model=name, layer=layer, idf=idf, scores=scores))
        if name == "roberta":
            check_package(GOLDEN / name, layer, idf, scores)
    goldens["bertscore"] = dict(candidates=CANDIDATES, references=REFERENCES, cases=cases)
    path = GOLDEN / "goldens.json"
    path.write_text(json.dumps(goldens, ensure_ascii=False) + "\n")
    for file in GOLDEN.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    import make_reward_models  # which takes tokenizers from here

    make_reward_models.main()
    import make_media_reward

    make_media_reward.main()


def check_package(directory, layer, idf, ours):
    try:
        import bert_score  # noqa: F401
    except ImportError:
        print("bert_score is not installed: not compared")
        return
    check_bert_score(directory, layer, idf, ours)


if __name__ == "__main__":
    main()
