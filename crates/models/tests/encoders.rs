//! Encoders against `transformers` 5.23 on tiny random checkpoints: outputs, and every gradient of those that serve as
//! towers. Data: `tools/goldens/make_encoders.py`.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;
use std::sync::Arc;

use omnigrpo_models::encoders::bert::{self, Bert, BertConfig};
use omnigrpo_models::encoders::clip::{Clip, ClipConfig};
use omnigrpo_models::encoders::siglip::{self, Siglip, SiglipConfig};
use omnigrpo_models::encoders::whisper::{self, Whisper, WhisperClass, WhisperConfig};
use omnigrpo_models::{ConfigJson, Init, ModelError, Result, WeightDtype, WeightFiles, WeightSource};
use omnigrpo_ops::{Activation, Param, Part, Pass, Rows, Tape, Var};
use omnigrpo_testkit::{Golden, golden, max_diff, sketch};

/// A tower inside a larger checkpoint: its tensors stand below a prefix.
struct Inside {
    files: WeightFiles,
    prefix: &'static str,
    params: BTreeMap<String, Arc<Param>>,
}

impl Inside {
    fn open(name: &str, prefix: &'static str, published: fn(&str) -> Option<String>) -> Self {
        let files = WeightFiles::open(&golden(&format!("encoders/{name}")), published).unwrap();
        Self { files, prefix, params: BTreeMap::new() }
    }

    fn train_all(&self) {
        self.params.values().for_each(|p| p.set_trainable(true));
    }
}

impl WeightSource for Inside {
    fn get(&mut self, name: &str, part: Part, shape: &[usize], _init: Init) -> Result<Arc<Param>> {
        let key = name.strip_prefix(self.prefix).unwrap();
        assert_eq!(self.files.shape(key), Some(shape), "{key}");
        let value = self.files.read(key, WeightDtype::Auto)?.unwrap();
        let param = Arc::new(Param::new(name, part, shape, value)?);
        assert!(self.params.insert(key.to_owned(), Arc::clone(&param)).is_none(), "{key} twice");
        Ok(param)
    }

    fn tied(&mut self, _embed: &str, _head: &str, config: bool) -> Result<bool> {
        Ok(config)
    }
}

fn config(name: &str) -> ConfigJson {
    ConfigJson::read(&golden(&format!("encoders/{name}/config.json"))).unwrap()
}

fn expected(name: &str) -> Golden {
    Golden::read(&format!("encoders/{name}.safetensors"))
}

#[track_caller]
fn close(got: &Rows, want: &[f32]) {
    let delta = max_diff(&got.to_vec(), want);
    assert!(delta <= 1e-4, "differs by {delta}");
}

/// Σ coefficients · output, backward.
fn backward(tape: Tape, coefficients: &[f32], output: &Var) {
    let (rows, cols) = output.rows().dims();
    tape.backward(output, Rows::from_vec(coefficients.to_vec(), rows, cols).unwrap()).unwrap();
}

/// ‖Δ‖ ≤ 1e-3 · ‖g‖ + 1e-6 · RMS over all tensors, by nine numbers per tensor.
fn check_gradients(params: &BTreeMap<String, Arc<Param>>, golden: &Golden) {
    let wanted: BTreeMap<_, _> =
        golden.f.iter().filter_map(|(k, v)| Some((k.strip_prefix("sketch.")?, v))).collect();
    let squares: f64 = wanted.values().map(|s| f64::from(s[0]).powi(2)).sum();
    let rms = (squares / wanted.len() as f64).sqrt();
    let mut compared = 0;
    for (name, param) in params {
        let got = param.grad();
        let Some(want) = wanted.get(name.as_str()) else {
            assert!(got.is_none(), "{name}: a gradient where transformers has none");
            continue;
        };
        let got = sketch(&got.unwrap_or_else(|| panic!("{name}: no gradient")));
        let bound = 1e-3 * f64::from(want[0]) + 1e-6 * rms;
        for (i, (a, b)) in got.iter().zip(want.iter()).enumerate() {
            let allowed = if i == 0 { bound } else { 4.0 * bound } + 1e-6 * f64::from(b.abs());
            assert!(
                (a - f64::from(*b)).abs() <= allowed,
                "{name}: sketch {i} is {a}, expected {b} ± {allowed}"
            );
        }
        compared += 1;
    }
    assert_eq!(compared, wanted.len(), "some golden gradients name no weight");
}

#[test]
fn siglip_equals_transformers() {
    let pass = Pass::default();
    let want = expected("siglip");
    let mut source = Inside::open("siglip", "tower.", siglip::published_name);
    let config = SiglipConfig::parse(&config("siglip")).unwrap();
    let tower = Siglip::build(config, "tower.", Part::Vision, &mut source).unwrap();
    assert_eq!(source.params.len(), source.files.names().count(), "every tensor belongs to the tower");
    source.train_all();
    let blocks = tower.config().blocks_at(-2).unwrap();
    for recompute in [false, true] {
        source.params.values().for_each(|p| p.clear_grad());
        let mut tape = Tape::recording(recompute);
        let hidden = tower.hidden(&want.f["pixels"], 2, blocks, &pass, &mut tape).unwrap();
        close(hidden.rows(), &want.f["hidden-2"]);
        backward(tape, &want.f["coefficients-2"], &hidden);
        let mut tape = Tape::recording(recompute);
        let last = tower.forward(&want.f["pixels"], 2, &pass, &mut tape).unwrap();
        close(last.rows(), &want.f["last"]);
        backward(tape, &want.f["coefficients"], &last);
        check_gradients(&source.params, &want);
    }
    // Without tape, from its own directory; a picture does not depend on its neighbour.
    let dir = golden("encoders/siglip");
    let tower = Siglip::load(&dir, Part::Vision, WeightDtype::Auto).unwrap();
    let half = want.f["pixels"].len() / 2;
    let second = tower.forward(&want.f["pixels"][half..], 1, &pass, &mut Tape::off()).unwrap();
    close(second.rows(), &want.f["last"][want.f["last"].len() / 2..]);
    let tower = Siglip::load(&dir, Part::Vision, WeightDtype::BFloat16).unwrap();
    let last = tower.forward(&want.f["pixels"], 2, &pass, &mut Tape::off()).unwrap().into_rows().into_vec();
    let delta = max_diff(&last, &want.f["last"]);
    assert!((1e-4..0.1).contains(&delta), "bf16 weights: {delta}");
    assert!(tower.forward(&want.f["pixels"][1..], 2, &pass, &mut Tape::off()).is_err());
    assert!(tower.hidden(&want.f["pixels"], 2, 4, &pass, &mut Tape::off()).is_err());
    let index = |i| tower.config().blocks_at(i).ok();
    assert_eq!([-5, -4, -1, 0, 3, 4].map(index), [None, Some(0), Some(3), Some(0), Some(3), None]);
}

#[test]
fn whisper_equals_transformers() {
    let pass = Pass::default();
    let want = expected("whisper");
    let mut source = Inside::open("whisper", "", whisper::published_name);
    let config = WhisperConfig::parse(&config("whisper"), &WhisperClass::WHISPER).unwrap();
    let columns = 2 * config.num_positions;
    let encoder = Whisper::build(config, "", Part::Audio, &mut source).unwrap();
    assert_eq!(source.params.len(), source.files.names().count());
    source.train_all();
    let mut tape = Tape::recording(false);
    let last = encoder.forward(&want.f["mel"], columns, &pass, &mut tape).unwrap();
    close(last.rows(), &want.f["last"]);
    backward(tape, &want.f["coefficients"], &last);
    check_gradients(&source.params, &want);
    let encoder = Whisper::load(&golden("encoders/whisper"), Part::Audio, WeightDtype::BFloat16).unwrap();
    let last =
        encoder.forward(&want.f["mel"], columns, &pass, &mut Tape::off()).unwrap().into_rows().into_vec();
    let delta = max_diff(&last, &want.f["last"]);
    assert!((1e-4..0.1).contains(&delta), "bf16 weights: {delta}");
    assert!(encoder.forward(&want.f["mel"][1..], columns, &pass, &mut Tape::off()).is_err());
}

fn texts(want: &Golden) -> Vec<Vec<u32>> {
    let ids = want.ids("ids");
    let mut at = 0;
    want.ids("lengths")
        .into_iter()
        .map(|len| {
            at += len as usize;
            ids[at - len as usize..at].to_vec()
        })
        .collect()
}

#[test]
fn bert_equals_transformers() {
    let pass = Pass::default();
    let want = expected("bert");
    let texts = texts(&want);
    let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
    let mut source = Inside::open("bert", "model.bert_model.", bert::published_name);
    let config = BertConfig::parse(&config("bert")).unwrap();
    let bert = Bert::build(config, true, "model.bert_model.", Part::Projector, &mut source).unwrap();
    assert_eq!(source.params.len(), source.files.names().count());
    source.train_all();
    let mut tape = Tape::recording(false);
    let pooled = bert.pooled(&texts, &pass, &mut tape).unwrap();
    close(pooled.rows(), &want.f["pooled"]);
    backward(tape, &want.f["coefficients"], &pooled);
    let mut tape = Tape::recording(true);
    let first = bert.first(&texts, &pass, &mut tape).unwrap();
    backward(tape, &want.f["coefficients.first"], &first);
    check_gradients(&source.params, &want);
    for (len, problem) in [(0, "0 tokens"), (17, "17 tokens")] {
        let error = bert.pooled(&[&vec![2; len]], &pass, &mut Tape::off()).unwrap_err().to_string();
        assert!(error.contains(problem) && error.contains("1 to 16"), "{error}");
    }
    let error = bert.first(&[&[2, 40]], &pass, &mut Tape::off()).unwrap_err().to_string();
    assert!(error.contains("id 40") && error.contains("40 rows"), "{error}");
}

#[test]
fn hidden_states_of_every_text_encoder_equal_transformers() {
    let pass = Pass::default();
    for name in ["bert", "roberta", "xlm-roberta", "distilbert"] {
        let want = expected(name);
        let texts = texts(&want);
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let model = Bert::load(&golden(&format!("encoders/{name}")), WeightDtype::Auto).unwrap();
        for blocks in 0..=model.config().sizes.layers {
            close(
                model.hidden(&texts, blocks, &pass, &mut Tape::off()).unwrap().rows(),
                &want.f[&format!("hidden.{blocks}")],
            );
        }
        assert!(model.pooled(&texts, &pass, &mut Tape::off()).is_err());
    }
    let max = |name| BertConfig::parse(&config(name)).unwrap().max_tokens();
    assert_eq!(["bert", "roberta", "xlm-roberta"].map(max), [16, 10, 10]);
}

#[test]
fn clip_equals_transformers() {
    let pass = Pass::default();
    for (name, end) in [("clip", None), ("clip_eos", Some(39))] {
        let want = expected(name);
        let texts = texts(&want);
        let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
        let clip = Clip::load(&golden(&format!("encoders/{name}")), WeightDtype::Auto).unwrap();
        assert_eq!(clip.config().end_token, end);
        close(&clip.text_features(&texts, &pass).unwrap(), &want.f["text"]);
        close(&clip.picture_features(&want.f["pixels"], 2, &pass).unwrap(), &want.f["pictures"]);
        assert!(clip.text_features(&[&[38; 9]], &pass).is_err());
    }
    let clip = Clip::load(&golden("encoders/clip_eos"), WeightDtype::Auto).unwrap();
    let error = clip.text_features(&[&[38, 4]], &pass).unwrap_err().to_string();
    assert!(error.contains("does not contain the end token"), "{error}");
}

/// The sizes that the hub's files leave to the class defaults, and files of another kind.
#[test]
fn published_configurations_are_read() {
    let read = |text: &str| {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        ConfigJson::read(&path).unwrap()
    };
    // google/siglip-base-patch16-224
    let siglip = SiglipConfig::parse(&read(
        r#"{"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}}"#,
    ));
    let siglip = siglip.unwrap();
    assert_eq!((siglip.picture.num_patches(), siglip.picture.sizes.hidden, siglip.head), (196, 768, true));
    // google/siglip-so400m-patch14-384
    let large = r#"{"vision_config": {"hidden_size": 1152, "image_size": 384, "intermediate_size": 4304,
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14}}"#;
    assert_eq!(SiglipConfig::parse(&read(large)).unwrap().picture.num_patches(), 729);
    // openai/whisper-large-v3
    let large = r#"{"d_model": 1280, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layers": 32,
        "num_mel_bins": 128, "max_source_positions": 1500, "activation_function": "gelu"}"#;
    let whisper = WhisperConfig::parse(&read(large), &WhisperClass::WHISPER).unwrap();
    assert_eq!((whisper.num_mels, whisper.num_positions, whisper.sizes.heads.dim), (128, 1500, 64));
    // google-bert/bert-base-uncased, FacebookAI/xlm-roberta-base, openai/clip-vit-base-patch16
    let base = r#"{"architectures": ["BertForMaskedLM"], "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072,
        "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert", "num_attention_heads": 12,
        "num_hidden_layers": 12, "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2}"#;
    let bert = BertConfig::parse(&read(base)).unwrap();
    assert_eq!((bert.vocab, bert.max_tokens(), bert.token_types, bert.sizes.layers), (30522, 512, 2, 12));
    let base = r#"{"hidden_size": 768, "layer_norm_eps": 1e-05, "max_position_embeddings": 514, "model_type": "xlm-roberta",
        "pad_token_id": 1, "type_vocab_size": 1, "vocab_size": 250002}"#;
    let roberta = BertConfig::parse(&read(base)).unwrap();
    assert_eq!((roberta.vocab, roberta.max_tokens(), roberta.token_types), (250_002, 512, 1));
    let clip = r#"{"projection_dim": 512, "vision_config": {"patch_size": 16, "model_type": "clip_vision_model"},
        "text_config": {"eos_token_id": 2, "bos_token_id": 0, "model_type": "clip_text_model"}}"#;
    let clip = ClipConfig::parse(&read(clip)).unwrap();
    assert_eq!((clip.picture.num_patches(), clip.picture.sizes.hidden, clip.projection), (196, 768, 512));
    assert_eq!((clip.vocab, clip.max_tokens, clip.text.hidden, clip.end_token), (49_408, 77, 512, None));
    assert_eq!(clip.text.activation, Activation::QuickGelu);
    let heads = r#"{"vision_config": {"hidden_size": 1152, "num_attention_heads": 7}}"#;
    let error = SiglipConfig::parse(&read(heads)).unwrap_err().to_string();
    assert!(error.contains("is 7, for a width of 1152, which is not a multiple of it"), "{error}");
    let error = BertConfig::parse(&read(r#"{"model_type": "t5"}"#)).unwrap_err();
    assert!(
        matches!(&error, ModelError::Config { what, .. } if what.contains("t5") && what.contains("xlm-roberta"))
    );
    let error = BertConfig::parse(&read(r#"{"hidden_act": "relu6"}"#)).unwrap_err().to_string();
    assert!(error.contains("relu6") && error.contains("quick_gelu"), "{error}");
    let error = BertConfig::parse(&read(r#"{"model_type": "roberta", "pad_token_id": 511}"#)).unwrap_err();
    assert!(error.to_string().contains("pad_token_id"));
}
