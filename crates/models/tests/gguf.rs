//! GGUF files of tiny text models, against what llama.cpp's converter writes, and back to checkpoints.
//!
//! `tools/goldens/make_gguf_models.py` writes the expected metadata and digests. The model `llama` has three key heads.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::path::{Path, PathBuf};

use half::{bf16, f16};
use omnigrpo_gguf::{GgufFile, GgufWriter, Metadata, TensorType, Value as Datum};
use omnigrpo_models::{Checkpoint, GgufPrecision, Model, WeightDtype, convert_gguf};
use omnigrpo_testkit::{golden, models::load};
use omnigrpo_text::{ChatTemplate, StopSet, Tokenizer};
use serde_json::Value;
use sha2::{Digest, Sha256};

fn checkpoint(name: &str) -> PathBuf {
    golden(&format!("checkpoints/{name}"))
}

fn export(name: &str, precision: GgufPrecision, folder: &Path) -> PathBuf {
    let path = folder.join(format!("{name}.gguf"));
    load(&checkpoint(name), WeightDtype::Float32).unwrap().save_gguf(&path, precision).unwrap();
    path
}

fn values(file: &GgufFile, name: &str) -> Vec<f32> {
    let tensor = file.tensors().iter().find(|tensor| tensor.name() == name).unwrap();
    let mut values = vec![0.0; tensor.num_values()];
    file.read(tensor, 0, &mut values).unwrap();
    values
}

/// Returns a value as the golden script writes it.
fn json(datum: &Datum) -> Value {
    match datum {
        Datum::F32(x) => f64::from(*x).into(),
        Datum::Bool(x) => (*x).into(),
        Datum::Text(x) => x.as_str().into(),
        Datum::List(list) => list.iter().map(json).collect(),
        integer => integer.count().unwrap().into(),
    }
}

#[test]
fn exported_files_have_the_metadata_and_the_values_of_llama_cpps_converter() {
    let expected: Value = serde_json::from_slice(&std::fs::read(golden("gguf.json")).unwrap()).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (name, (key, precision)) in TEXTS
        .iter()
        .flat_map(|name| [("f16", GgufPrecision::F16), ("q8_0", GgufPrecision::Q8_0)].map(|p| (name, p)))
    {
        let file = GgufFile::open(&export(name, precision, folder.path())).unwrap();
        let tensors = expected[name][key].as_object().unwrap();
        assert_eq!(file.tensors().len(), tensors.len(), "{name} {key}");
        for tensor in file.tensors() {
            let (place, own) = (format!("{name} {key} {}", tensor.name()), values(&file, tensor.name()));
            let expected = &tensors[tensor.name()];
            assert_eq!(expected[0], tensor.kind().name(), "{place}");
            assert_eq!(expected[1], serde_json::json!(tensor.shape()), "{place}");
            match &expected[2] {
                Value::Array(divisors) => {
                    let near = |(own, expected): (&f32, &Value)| {
                        (f64::from(*own) - expected.as_f64().unwrap()).abs() < 1e-5
                    };
                    assert!(
                        own.len() == divisors.len() && own.iter().zip(divisors).all(near),
                        "{place}: {own:?}"
                    );
                }
                digest => {
                    let mut hash = Sha256::new();
                    own.iter().for_each(|x| hash.update(x.to_le_bytes()));
                    let own: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
                    assert_eq!(*digest, own, "{place}");
                }
            }
        }
        // The converter also writes sampling parameters, and switches that are off.
        for (key, expected) in expected[name]["metadata"].as_object().unwrap() {
            let own = key.starts_with(name) || key.starts_with("tokenizer.") || key == "general.architecture";
            if !own
                || ["tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"].contains(&key.as_str())
            {
                continue;
            }
            let got = file.get(key).unwrap_or_else(|| panic!("{name}: no {key}"));
            assert_eq!(json(got), *expected, "{name}: {key}");
        }
    }
}

/// Texts whose ids show a difference between ways to cut words, to normalise and to find control tokens.
/// Models with an architecture that llama.cpp's files name.
const TEXTS: [&str; 3] = ["qwen2", "qwen3", "llama"];

const TEXTS_TO_ENCODE: [&str; 6] = [
    "I'VE 1234 words,\n\n  and  spaces\t\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>ok</think>",
    "Grüße Grüße, 世界 ไทย हिन्दी עברית العربية",
    "👩‍👩‍👧‍👦 ½ Ⅷ ﬁ\u{a0}x\u{200d}",
    "",
    "   leading and trailing   ",
];

#[test]
fn an_exported_file_converts_to_the_same_model() {
    let folder = tempfile::tempdir().unwrap();
    for name in TEXTS {
        let path = export(name, GgufPrecision::F16, folder.path());
        let (old_dir, dir) = (checkpoint(name), folder.path().join(name));
        let done = convert_gguf(&path, &dir, WeightDtype::Auto).unwrap();
        let old = load(&old_dir, WeightDtype::Auto).unwrap();
        let new = load(&dir, WeightDtype::Auto).unwrap();
        assert_eq!((done.family, done.num_weights), (name, old.params().len()));
        assert_eq!(done.notes.len(), usize::from(name == "qwen2"), "{:?}", done.notes);

        let mut expected = old.decoder().config().clone();
        expected.padding = None;
        assert_eq!(*new.decoder().config(), expected);
        assert_eq!(new.decoder().tied(), old.decoder().tied());
        for (old, new) in old.params().iter().zip(new.params()) {
            assert_eq!((old.name(), old.shape()), (new.name(), new.shape()));
            let matrix = old.shape().len() == 2;
            let rounded = |x: &f32| if matrix { f16::from_f32(*x).to_f32() } else { *x };
            let expected: Vec<f32> = old.read().f32().iter().map(rounded).collect();
            assert!(*new.read().f32() == expected, "{name}: {}", old.name());
        }

        let tokenizers = [&old_dir, &dir].map(|dir| Tokenizer::from_dir(dir).unwrap());
        for text in TEXTS_TO_ENCODE {
            let ids = tokenizers.each_ref().map(|tokenizer| tokenizer.encode_control(text, &[]).unwrap());
            assert_eq!(ids[0], ids[1], "{text:?}");
            let decoded = tokenizers.each_ref().map(|tokenizer| tokenizer.decode(&ids[0], true).unwrap());
            assert_eq!(decoded[0], decoded[1], "{text:?}");
        }
        let stops = |i: usize| StopSet::from_dir([&old_dir, &dir][i], &tokenizers[i], &[]).unwrap();
        assert_eq!(stops(0), stops(1));
        let template = |dir: &Path| ChatTemplate::from_dir(dir).unwrap().source().to_owned();
        assert_eq!(template(&old_dir), template(&dir));
    }
}

#[test]
fn values_are_rounded_to_bfloat16_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let path = export("llama", GgufPrecision::Q8_0, folder.path());
    let convert = |dtype, name: &str| {
        convert_gguf(&path, &folder.path().join(name), dtype).unwrap();
        load(&folder.path().join(name), WeightDtype::Auto).unwrap()
    };
    let (wide, narrow) = (convert(WeightDtype::Auto, "wide"), convert(WeightDtype::BFloat16, "narrow"));
    for (wide, narrow) in wide.params().iter().zip(narrow.params()) {
        let expected: Vec<f32> = wide.read().f32().iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        assert!(*narrow.read().f32() == expected && narrow.dtype() == omnigrpo_ops::ParamDtype::Bf16);
    }
    // The values before: those of the file, in the order of the checkpoint.
    let file = GgufFile::open(&path).unwrap();
    let down =
        wide.params().iter().find(|param| param.name() == "model.layers.1.mlp.down_proj.weight").unwrap();
    assert!(*down.read().f32() == values(&file, "blk.1.ffn_down.weight"));
}

type Tensors = Vec<(String, Vec<usize>, Vec<f32>)>;

/// Writes a changed copy of a file, and returns the message with which it is refused.
fn refused(path: &Path, change: impl FnOnce(&mut Metadata, &mut Tensors)) -> String {
    let folder = tempfile::tempdir().unwrap();
    let (dir, to) = (folder.path().join("checkpoint"), folder.path().join("changed.gguf"));
    let file = GgufFile::open(path).unwrap();
    let mut metadata = file.metadata().to_vec();
    let mut tensors: Tensors = file
        .tensors()
        .iter()
        .map(|tensor| (tensor.name().to_owned(), tensor.shape().to_vec(), values(&file, tensor.name())))
        .collect();
    change(&mut metadata, &mut tensors);
    let listed: Vec<_> =
        tensors.iter().map(|(name, shape, _)| (name.clone(), shape.clone(), TensorType::F32)).collect();
    let mut writer = GgufWriter::create(&to, &metadata, &listed).unwrap();
    tensors.iter().for_each(|(_, _, values)| writer.write(values).unwrap());
    writer.finish().unwrap();
    let done = convert_gguf(&to, &dir, WeightDtype::Auto);
    if let Err(error) = &done {
        let error = error.to_string();
        assert!(error.contains("changed.gguf"), "{error}");
        // No weights are written before everything else fits.
        assert!(!dir.join("model.safetensors").exists(), "{error}");
        return error;
    }
    Model::load(&Checkpoint::open(&dir).unwrap(), &Default::default()).unwrap();
    String::new()
}

#[test]
fn files_that_do_not_fit_are_refused_with_got_and_expected() {
    let folder = tempfile::tempdir().unwrap();
    let llama = export("llama", GgufPrecision::F16, folder.path());
    let qwen2 = export("qwen2", GgufPrecision::F16, folder.path());
    // The unchanged copy converts.
    assert_eq!(refused(&llama, |_, _| ()), "");
    let with = |path: &Path, key: &str, value: Option<Datum>| {
        refused(path, |metadata, _| {
            metadata.retain(|(name, _)| name != key);
            metadata.extend(value.map(|value| (key.to_owned(), value)));
        })
    };
    let list = |path: &Path, key: &str, change: &dyn Fn(&mut Vec<Datum>)| {
        refused(path, |metadata, _| {
            let Some((_, Datum::List(list))) = metadata.iter_mut().find(|(name, _)| name == key) else {
                return;
            };
            change(list);
        })
    };
    let (tokens, kinds, merges) =
        ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges");
    let cases = [
        (
            with(&llama, "general.architecture", Some("gemma3".into())),
            "general.architecture is \"gemma3\", expected one of qwen2, qwen3, llama",
        ),
        (with(&llama, "general.architecture", None), "general.architecture is missing"),
        (
            with(&llama, "llama.expert_count", Some(Datum::U32(8))),
            "llama.expert_count is U32(8), which is unsupported",
        ),
        (
            with(&llama, "llama.attention.sliding_window", Some(Datum::U32(8))),
            "llama.attention.sliding_window",
        ),
        (
            with(&llama, "llama.attention.head_count", Some(Datum::List(vec![Datum::U32(6); 2]))),
            "llama.attention.head_count is a list of 2 values, expected one integer",
        ),
        (with(&llama, "llama.attention.head_count", Some(Datum::U32(0))), "num_attention_heads is 0"),
        (
            with(&llama, "llama.attention.head_count_kv", Some(Datum::U32(4))),
            "6 heads of width 16 cannot share 4",
        ),
        (
            with(&llama, "llama.block_count", Some(Datum::U32(3))),
            "missing tensor blk.2.attn_norm.weight [96]",
        ),
        (with(&llama, "llama.block_count", Some(Datum::U32(1))), "unknown tensor blk.1.attn_k.weight"),
        (
            with(&llama, "llama.block_count", Some(Datum::U64(u64::MAX))),
            "num_hidden_layers is 18446744073709551615",
        ),
        (with(&llama, "llama.embedding_length", Some(Datum::U32(64))), "shape [320, 96], expected [320, 64]"),
        (
            with(&llama, "llama.rope.dimension_count", Some(Datum::U32(8))),
            "rope.dimension_count is 8, expected 16",
        ),
        (with(&llama, "llama.attention.layer_norm_rms_epsilon", None), "layer_norm_rms_epsilon is missing"),
        (
            with(&llama, "llama.rope.scaling.type", Some("longrope".into())),
            "rope.scaling.type is \"longrope\"",
        ),
        (with(&qwen2, "qwen2.rope.scaling.factor", None), "rope.scaling.type is \"yarn\" with factor"),
        (
            with(&llama, "tokenizer.ggml.model", Some("llama".into())),
            "tokenizer.ggml.model is \"llama\", expected \"gpt2\"",
        ),
        (
            with(&llama, "tokenizer.ggml.pre", Some("tekken".into())),
            "tokenizer.ggml.pre is \"tekken\", expected one of qwen2, llama-bpe",
        ),
        (with(&llama, kinds, None), "tokenizer.ggml.token_type is missing"),
        (
            with(&llama, "tokenizer.ggml.eos_token_id", Some(Datum::U32(320))),
            "eos_token_id is 320, expected one of 320 tokens",
        ),
        (with(&llama, "tokenizer.ggml.eos_token_id", Some(Datum::U32(319))), "eos_token_id is 319"),
        (
            with(&llama, "tokenizer.ggml.add_eos_token", Some(Datum::Bool(true))),
            "add_eos_token is true, expected false",
        ),
        (
            list(&llama, kinds, &|kinds| drop(kinds.pop())),
            "tokenizer.ggml.token_type has 319 values, expected 320",
        ),
        (list(&llama, kinds, &|kinds| kinds[5] = Datum::I32(6)), "is of kind 6, expected a kind from 1 to 5"),
        (list(&llama, tokens, &|tokens| tokens[5] = tokens[4].clone()), "tokens 4 and 5 are both"),
        (list(&llama, tokens, &|tokens| tokens.fill(Datum::U8(1))), "expected a list of texts"),
        (
            list(&llama, merges, &|merges| merges[0] = "a b c".into()),
            "merge 0 is \"a b c\", expected two tokens",
        ),
        (list(&llama, merges, &|merges| merges[0] = "a".into()), "merge 0 is \"a\""),
        (list(&llama, merges, &|merges| merges[0] = "<think> a".into()), "merge 0 is"),
        (
            refused(&llama, |metadata, _| {
                for (key, value) in metadata.iter_mut() {
                    if let (true, Datum::List(list)) = (key == tokens || key == kinds, value) {
                        list.pop();
                    }
                }
            }),
            "tokenizer.ggml.tokens has 319 tokens, expected 320",
        ),
        (refused(&llama, |_, tensors| tensors[0].2[3] *= 2.0), "rope_freqs.weight is"),
        (
            refused(&llama, |_, tensors| tensors[0].1 = vec![2, 4]),
            "rope_freqs.weight has shape [2, 4], expected [8]",
        ),
        (refused(&llama, |_, tensors| tensors[1].0 = "embd".into()), "tensor token_embd.weight is missing"),
        (
            refused(&llama, |_, tensors| tensors[1].1 = vec![320 * 96]),
            "token_embd.weight has shape [30720], expected two sizes",
        ),
        (
            refused(&qwen2, |_, tensors| tensors.retain(|(name, ..)| !name.ends_with("attn_q.bias"))),
            "missing tensor blk.0.attn_q.bias [32]",
        ),
    ];
    for (error, part) in cases {
        assert!(error.contains(part), "`{part}` is not in: {error}");
    }
}

#[test]
fn what_gguf_cannot_express_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let changed = |file: &str, change: &dyn Fn(&mut Value)| {
        let dir = tempfile::tempdir_in(folder.path()).unwrap();
        for entry in std::fs::read_dir(checkpoint("qwen2")).unwrap() {
            let from = entry.unwrap().path();
            std::fs::copy(&from, dir.path().join(from.file_name().unwrap())).unwrap();
        }
        let path = dir.path().join(file);
        let mut json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        let model = load(dir.path(), WeightDtype::Float32).unwrap();
        model.save_gguf(&folder.path().join("x.gguf"), GgufPrecision::F16).unwrap_err().to_string()
    };
    let error = changed("tokenizer.json", &|json| json["model"]["ignore_merges"] = true.into());
    assert!(
        error.contains("those of no name in GGUF") && error.contains("qwen2, llama-bpe, smollm, gpt-2"),
        "{error}"
    );
    let error =
        changed("tokenizer.json", &|json| json["normalizer"] = serde_json::json!({ "type": "Lowercase" }));
    assert!(error.contains("those of no name in GGUF"), "{error}");
    let error =
        changed("tokenizer_config.json", &|json| json["added_tokens_decoder"]["296"]["lstrip"] = true.into());
    assert!(error.contains("has lstrip, which GGUF cannot express"), "{error}");
    let error = changed("config.json", &|json| json["rope_scaling"]["beta_fast"] = 16.into());
    assert!(error.contains("beta_fast 16") && error.contains("for GGUF expected 32"), "{error}");
    let error =
        changed("generation_config.json", &|json| json["eos_token_id"] = serde_json::json!([1, 2, 3, 298]));
    assert!(error.contains("token 3 is one stop token too many"), "{error}");

    let model = load(&checkpoint("qwen2_vl_tied"), WeightDtype::Float32).unwrap();
    let error = model.save_gguf(&folder.path().join("x.gguf"), GgufPrecision::F16).unwrap_err().to_string();
    assert!(
        error.contains("\"qwen2_vl\" cannot be written as GGUF; expected one of qwen2, qwen3, llama"),
        "{error}"
    );
}

/// A file with a changed byte is an error, or a checkpoint that loads.
#[test]
fn changed_bytes_never_panic_and_never_write_what_does_not_load() {
    let folder = tempfile::tempdir().unwrap();
    let original = std::fs::read(export("qwen3", GgufPrecision::Q8_0, folder.path())).unwrap();
    let (path, dir) = (folder.path().join("changed.gguf"), folder.path().join("checkpoint"));
    let (mut state, mut converted) = (1u64, 0);
    for _ in 0..300 {
        let mut bytes = original.clone();
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // Most of the first 12,000 bytes are metadata and the list of tensors.
        let at = (state >> 33) as usize % 12_000;
        bytes[at] ^= 1 << (state >> 60 & 7);
        std::fs::write(&path, bytes).unwrap();
        if convert_gguf(&path, &dir, WeightDtype::Auto).is_ok() {
            load(&dir, WeightDtype::Auto).unwrap_or_else(|error| panic!("byte {at}: {error}"));
            converted += 1;
        }
        let _ = std::fs::remove_dir_all(&dir);
    }
    assert!((1..300).contains(&converted), "{converted}");
}
