//! Checkpoint directories: every published layout and size, what is saved, and what is refused.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

#[path = "checkpoints/media_store.rs"]
mod media_store;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use omnigrpo_guard::told;
use omnigrpo_kernels::quant::QuantBits;
use omnigrpo_models::{
    Checkpoint, GroupStream, Init, LoadOptions, LoraConfig, MediaSettings, Model, ModelError, PackedStream,
    Prompt, PromptBuilder, Quantization, ReferencePlace, WeightDtype, WeightSource,
};
use omnigrpo_ops::{Param, ParamDtype, Part};
use omnigrpo_testkit::{Golden, case_prompt, checkpoint, copy_dir, golden, max_diff, train_all, weight_bits};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

fn load(name: &str, dtype: WeightDtype) -> Model {
    omnigrpo_testkit::load(&checkpoint(name), dtype).unwrap()
}

/// Completion log-probabilities of case A, or of case B if the model reads text only.
fn logprobs(model: &Model) -> Vec<f32> {
    let case = if model.family().reads_text_only() { "B" } else { "A" };
    let prompt = case_prompt(case, model);
    let completion = Golden::read(&format!("cases/{case}.safetensors")).ids("completion_ids");
    let groups = [GroupStream { prompt: &prompt, completions: vec![&completion] }];
    let features = vec![model.encode_prompt(&prompt).unwrap()];
    model.score(&PackedStream::new(&groups).unwrap(), &features, 1.0).unwrap().0
}

#[test]
fn in_memory_names_and_a_nested_config_are_the_same_model() {
    let (published, in_memory) =
        (load("qwen2_vl_tied", WeightDtype::Auto), load("qwen2_vl_tied_in_memory", WeightDtype::Auto));
    assert_eq!(weight_bits(&in_memory), weight_bits(&published));
    assert_eq!(in_memory.decoder().config(), published.decoder().config());
    assert_eq!(logprobs(&in_memory), logprobs(&published));
}

#[test]
fn bfloat16_is_kept_widened_or_made_as_asked() {
    let dtypes = |model: &Model| -> BTreeSet<String> {
        model.params().iter().map(|p| format!("{:?}", p.dtype())).collect()
    };
    let stored = load("qwen2_5_vl_tied_bf16", WeightDtype::Auto);
    assert_eq!(dtypes(&stored), BTreeSet::from(["Bf16".to_owned()]));
    let widened = load("qwen2_5_vl_tied_bf16", WeightDtype::Float32);
    assert_eq!(dtypes(&widened), BTreeSet::from(["F32".to_owned()]));
    assert_eq!(weight_bits(&widened), weight_bits(&stored));
    // Rounding here is torch's rounding.
    let rounded = load("qwen2_5_vl_tied", WeightDtype::BFloat16);
    assert_eq!(dtypes(&rounded), BTreeSet::from(["Bf16".to_owned()]));
    assert_eq!(weight_bits(&rounded), weight_bits(&stored));

    let exact = logprobs(&load("qwen2_5_vl_tied", WeightDtype::Auto));
    let (bf16, wide) = (logprobs(&stored), logprobs(&widened));
    // Activations are f32 either way, so only the order of sums can differ; but where products run on tiles, those with
    // bf16 weights round them, to 8 bits as well.
    let bound = if omnigrpo_models::Arithmetic::default().rounds_bf16() { 0.1 } else { 1e-4 };
    assert!(max_diff(&bf16, &wide) <= bound, "{}", max_diff(&bf16, &wide));
    // Weights carry 8 bits; log-probabilities of this fixture are around -10.
    let d = max_diff(&bf16, &exact);
    assert!(d > 1e-3 && d <= 0.2, "{d}");
}

#[test]
fn what_is_saved_loads_to_the_same_bits() {
    for name in [
        "qwen2_vl_tied",
        "qwen2_vl_tied_in_memory",
        "qwen2_5_vl_untied",
        "qwen2_5_vl_tied_bf16",
        "qwen3_vl",
        "qwen3_vl_untied",
        "qwen2",
        "qwen3",
        "llama",
    ] {
        let model = load(name, WeightDtype::Auto);
        let dir = TempDir::new().unwrap();
        let saved = dir.path().join("saved");
        model.save_pretrained(&saved).unwrap();

        // Every file of the original except its weights, unchanged; weights in one file.
        let files = |dir: &Path| -> BTreeSet<String> {
            let names = std::fs::read_dir(dir).unwrap();
            names.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
        };
        let mut expected: BTreeSet<String> =
            files(&checkpoint(name)).into_iter().filter(|f| !f.starts_with("model")).collect();
        for file in expected.iter().filter(|f| *f != "config.json") {
            let read = |dir: &Path| std::fs::read(dir.join(file)).unwrap();
            assert_eq!(read(&saved), read(&checkpoint(name)), "{name}: {file}");
        }
        expected.insert("model.safetensors".into());
        assert_eq!(files(&saved), expected, "{name}");
        let config = |dir: &Path| -> serde_json::Value {
            serde_json::from_slice(&std::fs::read(dir.join("config.json")).unwrap()).unwrap()
        };
        let (mut before, mut after) = (config(&checkpoint(name)), config(&saved));
        assert_eq!(after["tie_word_embeddings"], model.decoder().tied(), "{name}");
        before["tie_word_embeddings"] = after["tie_word_embeddings"].take();
        after["tie_word_embeddings"] = before["tie_word_embeddings"].clone();
        assert_eq!(after, before, "{name}");

        // Published names; a tied head is not written twice.
        let bytes = std::fs::read(saved.join("model.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.names().contains(&"lm_head.weight"), !model.decoder().tied(), "{name}");
        for tensor in file.names() {
            let published = match name.starts_with("qwen3_vl") {
                true => &["model.language_model.", "model.visual.", "lm_head."][..],
                false => &["model.embed_tokens.", "model.layers.", "model.norm.", "visual.", "lm_head."],
            };
            assert!(published.iter().any(|p| tensor.starts_with(p)), "{name}: {tensor}");
        }
        let again = omnigrpo_testkit::load(&saved, WeightDtype::Auto).unwrap();
        assert_eq!(weight_bits(&again), weight_bits(&model), "{name}");
        assert_eq!(logprobs(&again), logprobs(&model), "{name}");

        // A directory loaded over other weights in memory.
        for param in again.params() {
            param.store(&vec![0.5; param.len()]).unwrap();
        }
        again.load_weights(&saved).unwrap();
        assert_eq!(weight_bits(&again), weight_bits(&model), "{name}");
    }
}

/// Records what an architecture asks for without making it.
struct Recorder {
    asked: BTreeMap<String, Vec<usize>>,
}

impl WeightSource for Recorder {
    fn get(
        &mut self,
        name: &str,
        part: Part,
        shape: &[usize],
        _init: Init,
    ) -> omnigrpo_models::Result<Arc<Param>> {
        assert!(self.asked.insert(name.to_owned(), shape.to_vec()).is_none(), "{name} is asked for twice");
        Ok(Arc::new(Param::outline(name, part, shape, ParamDtype::F32)))
    }

    fn tied(&mut self, _embed: &str, _head: &str, config: bool) -> omnigrpo_models::Result<bool> {
        Ok(config)
    }

    /// Only some checkpoints of an architecture have this one, and published files of Aria do.
    fn has(&self, name: &str) -> bool {
        name.starts_with("vision_tower.post_layernorm")
    }
}

/// An outline knows the names, shapes, dtypes and bytes of a model without its data.
#[test]
fn an_outline_is_the_model_without_its_data() {
    let keep = |_: &str, part: Part| part == Part::Projector;
    for name in [
        "qwen2_5_vl_tied_bf16",
        "qwen2_vl_untied",
        "qwen3_vl",
        "internvl_original",
        "aria",
        "smolvlm",
        "omni",
    ] {
        let opened = Checkpoint::open(&checkpoint(name)).unwrap();
        for bits in [None, Some(QuantBits::Eight), Some(QuantBits::Four)] {
            for dtype in [WeightDtype::Auto, WeightDtype::Float32, WeightDtype::BFloat16] {
                let quantization = bits.map(|bits| Quantization { bits, keep: &keep });
                let options = LoadOptions { dtype, quantization, ..LoadOptions::default() };
                let outline = Model::load(&opened, &LoadOptions { outline: true, ..options }).unwrap();
                let model = Model::load(&opened, &options).unwrap();
                let facts = |model: &Model| -> Vec<_> {
                    let each = model.params().iter();
                    each.map(|p| {
                        (p.name().to_owned(), p.part(), p.shape().to_vec(), p.dtype(), p.num_bytes())
                    })
                    .collect()
                };
                assert_eq!(facts(&outline), facts(&model), "{name} {bits:?} {dtype:?}");
                for param in outline.params() {
                    let refused = [param.values().map(drop), param.store(&vec![0.0; param.len()])];
                    for result in refused {
                        let message = told(&result.unwrap_err());
                        assert!(message.contains("only its outline is loaded"), "{message}");
                    }
                }
            }
        }
    }
}

/// Weights in mapped files are the weights that are read, where they are held as the file has them; they cannot be written.
#[test]
fn weights_in_place_are_those_that_are_read() {
    let keep = |_: &str, _: Part| false;
    let load = |name: &str, dtype: WeightDtype, bits: Option<QuantBits>, in_place: bool| {
        let quantization = bits.map(|bits| Quantization { bits, keep: &keep });
        let all = |_: &str, _: Part| true;
        let in_place: Option<omnigrpo_models::Chosen> = if in_place { Some(&all) } else { None };
        let options = LoadOptions { dtype, quantization, in_place, ..LoadOptions::default() };
        Model::load(&Checkpoint::open(&checkpoint(name)).unwrap(), &options).unwrap()
    };
    for name in ["qwen2_5_vl_tied", "qwen2_5_vl_tied_bf16", "humanomni"] {
        let (read, mapped) =
            (load(name, WeightDtype::Auto, None, false), load(name, WeightDtype::Auto, None, true));
        assert_eq!(weight_bits(&mapped), weight_bits(&read), "{name}");
        for (param, own) in mapped.params().iter().zip(read.params()) {
            assert!(param.is_mapped() && !own.is_mapped(), "{name}: {}", param.name());
            assert_eq!((param.num_bytes(), param.dtype()), (own.num_bytes(), own.dtype()));
            let message = param.store(&vec![0.0; param.len()]).unwrap_err().to_string();
            assert!(message.contains("a weight in a mapped file cannot be written"), "{message}");
        }
    }
    let (read, mapped) = (
        load("qwen2_5_vl_tied_bf16", WeightDtype::Auto, None, false),
        load("qwen2_5_vl_tied_bf16", WeightDtype::Auto, None, true),
    );
    assert_eq!(logprobs(&mapped), logprobs(&read));
    // A run resumes with such weights if its checkpoint has the same ones.
    let saved = tempfile::tempdir().unwrap();
    let load_saved = || {
        read.save_pretrained(saved.path()).unwrap();
        mapped.load_weights(saved.path())
    };
    load_saved().unwrap();
    read.params()[0].update(|values| values[1] += 1.0).unwrap();
    let message = load_saved().unwrap_err().to_string();
    assert!(message.contains("is not trained, but differs from the one in"), "{message}");
    // Weights of another dtype than the file's are read.
    let widened = load("qwen2_5_vl_tied_bf16", WeightDtype::Float32, None, true);
    assert!(widened.params().iter().all(|p| !p.is_mapped()));
    let few = load("qwen2_5_vl_tied", WeightDtype::Auto, Some(QuantBits::Eight), true);
    for param in few.params() {
        assert_eq!(param.is_mapped(), param.dtype() == ParamDtype::F32, "{}", param.name());
    }
}

/// Pages of a file that are memory of this process, bytes.
#[cfg(target_os = "linux")]
fn resident(file: &Path) -> u64 {
    let (file, maps) = (file.to_str().unwrap(), std::fs::read_to_string("/proc/self/smaps").unwrap());
    let mut own = false;
    let kib = maps.lines().filter_map(|line| {
        // A map begins with its range of addresses.
        if line.split('-').next().is_some_and(|from| u64::from_str_radix(from, 16).is_ok()) {
            own = line.ends_with(file);
        }
        line.strip_prefix("Rss:").filter(|_| own)?.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    });
    1024 * kib.sum::<u64>()
}

/// Weights of a reference stay in the files that hold just their numbers. They are those of a copy to the bit, whatever becomes of the
/// policy, and are not kept in memory; files that are written to meanwhile are noticed, replaced ones are there still.
#[test]
fn a_reference_stays_in_files_that_hold_its_numbers() {
    let dir = TempDir::new().unwrap();
    copy_dir(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets/model"), dir.path());
    let load = |dtype: WeightDtype| {
        let model = omnigrpo_testkit::load(dir.path(), dtype).unwrap();
        train_all(&model);
        model
    };
    let model = load(WeightDtype::Auto);
    let (lent, copied) = (
        model.reference(ReferencePlace::Files).unwrap(),
        model.reference(ReferencePlace::Memory(model.device())).unwrap(),
    );
    assert!(lent.params().iter().all(|weight| weight.is_mapped() && !weight.trainable()));
    let ids: Vec<u32> = (5..40).collect();
    let prompt = Prompt {
        ids: ids[..20].to_vec(),
        spans: Vec::new(),
        positions: (0..20).map(|at| [at; 3]).collect(),
        next_position: 20,
        media: Vec::new(),
        instruction: Vec::new(),
        text: String::new(),
    };
    let groups = [GroupStream { prompt: &prompt, completions: vec![&ids[20..], &ids[25..]] }];
    let stream = PackedStream::new(&groups).unwrap();
    let score = |model: &Model| model.score(&stream, &[Vec::new()], 1.0).unwrap().0;
    let expected = score(&copied);
    let bytes = model.params().iter().map(|weight| weight.num_bytes() as u64).sum::<u64>();
    let largest = model.params().iter().map(|weight| weight.num_bytes() as u64).max().unwrap();
    assert_eq!(model.reference_bytes(), largest);
    for weight in model.params() {
        weight.store(&vec![0.5; weight.len()]).unwrap();
    }
    assert_eq!(score(&lent), expected);
    #[cfg(target_os = "linux")]
    {
        let file = dir.path().join("model.safetensors");
        // Small weights stay, and pages beside what is read.
        assert!(resident(&file) < bytes / 2, "{} of {bytes} bytes are still in memory", resident(&file));
        let guards: Vec<_> = lent.params().iter().map(|weight| weight.read()).collect();
        let sum: f32 = guards.iter().flat_map(|guard| guard.f32().to_vec()).sum();
        assert!(sum.is_finite() && resident(&file) > bytes / 10 * 9, "{}", resident(&file));
    }

    // A weight that is not the file's any more is copied, and all are where the file has another dtype.
    let changed = load(WeightDtype::Auto);
    let first = &changed.params()[0];
    let mut values = first.read().f32().into_owned();
    values[0] += 1.0;
    first.store(&values).unwrap();
    let reference = changed.reference(ReferencePlace::Files).unwrap();
    let mapped: Vec<bool> = reference.params().iter().map(|weight| weight.is_mapped()).collect();
    assert_eq!(mapped.iter().filter(|mapped| !**mapped).count(), 1);
    assert!(!mapped[0] && reference.params()[0].read().f32() == values);
    let narrow = load(WeightDtype::BFloat16);
    let all = narrow.params().iter().map(|weight| weight.num_bytes() as u64).sum::<u64>();
    assert_eq!(narrow.reference_bytes(), all);
    let narrow = narrow.reference(ReferencePlace::Files).unwrap();
    assert!(narrow.params().iter().all(|weight| !weight.is_mapped()));

    // Another file in its place leaves the one that is open.
    let file = dir.path().join("model.safetensors");
    let other = dir.path().join("other");
    std::fs::write(&other, b"another download").unwrap();
    std::fs::copy(&file, dir.path().join("kept")).unwrap();
    std::fs::rename(&other, &file).unwrap();
    lent.files_unchanged().unwrap();
    assert_eq!(score(&lent), expected);
    std::fs::rename(dir.path().join("kept"), &file).unwrap();
    let again = load(WeightDtype::Auto).reference(ReferencePlace::Files).unwrap();
    again.files_unchanged().unwrap();
    let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
    open.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let message = told(&again.files_unchanged().unwrap_err());
    assert!(
        message.contains("model.safetensors was modified while the reference model read its weights"),
        "{message}"
    );
    narrow.files_unchanged().unwrap();
}

#[test]
fn published_sizes_have_the_tensors_transformers_makes() {
    let text = std::fs::read(golden("published/tensors.json")).unwrap();
    let list: serde_json::Value = serde_json::from_slice(&text).unwrap();
    let list = list.as_object().unwrap();
    assert_eq!(list.len(), 64);
    for (size, entry) in list {
        let mut expected = BTreeMap::new();
        for tensor in entry["tensors"].as_array().unwrap() {
            let name = tensor[0].as_str().unwrap();
            let shape: Vec<usize> =
                tensor[1].as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as usize).collect();
            // The number of layers, or the layers that have the tensor.
            let layers: Vec<u64> = match &tensor[2] {
                Value::Array(layers) => layers.iter().map(|layer| layer.as_u64().unwrap()).collect(),
                count => (0..count.as_u64().unwrap()).collect(),
            };
            if layers.is_empty() {
                expected.insert(name.to_owned(), shape.clone());
            }
            expected.extend(layers.iter().map(|i| (name.replace("{i}", &i.to_string()), shape.clone())));
        }
        // Published directories also have processor and tokenizer files, which say nothing about tensors.
        let dir = TempDir::new().unwrap();
        copy_dir(&golden("published").join(size), dir.path());
        let (from, file) = match size {
            s if s.starts_with("internvl_hf") => ("internvl_hf", "preprocessor_config.json"),
            s if s.starts_with("internvl") => ("internvl_original", "tokenizer.json"),
            s if s.starts_with("aria") => ("aria", "preprocessor_config.json"),
            s if s.starts_with("qwen2_5_omni") || s.starts_with("qwen2_audio") => ("omni", "tokenizer.json"),
            s if s.starts_with("qwen3_5_text") => ("qwen3_5_text", "tokenizer.json"),
            s if s.starts_with("qwen3_5") => ("qwen3_5", "preprocessor_config.json"),
            s if s.starts_with("qwen3_vl") => ("qwen3_vl", "preprocessor_config.json"),
            s if s.contains("_vl_") => ("qwen2_vl_tied", "preprocessor_config.json"),
            _ => ("qwen2", "tokenizer.json"),
        };
        let text = std::fs::read_to_string(checkpoint(from).join(file)).unwrap();
        std::fs::write(dir.path().join(file), text.replace(": 28", ": 448").replace(": 112", ": 980"))
            .unwrap();
        let opened = Checkpoint::open(dir.path()).unwrap();
        if size == "qwen2_5_omni_7B" {
            check_speakers(opened.family().format(), recorded_speakers());
        }
        let mut recorder = Recorder { asked: BTreeMap::new() };
        let network = opened.family().architecture().network(&mut recorder).unwrap();
        assert_eq!(network.decoder.tied(), entry["tied"].as_bool().unwrap(), "{size}");
        let parameters: usize = recorder.asked.values().map(|s| s.iter().product::<usize>()).sum();
        assert_eq!(parameters as u64, entry["parameters"].as_u64().unwrap(), "{size}");
        for (name, shape) in &expected {
            assert_eq!(recorder.asked.get(name), Some(shape), "{size}: {name}");
        }
        assert_eq!(recorder.asked.len(), expected.len(), "{size}");
    }
}

/// Patterns of the names of talker and decoder of waves in Qwen2.5-Omni-7B, with the number of their names.
fn recorded_speakers() -> BTreeMap<String, usize> {
    let text = std::fs::read(golden("published/qwen2_5_omni_7B/speakers.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// Saved copies contain the parts that speak, and the network none of them. The published index has one tensor more than the classes
/// of `transformers`, a table of frequencies.
fn check_speakers(format: &dyn omnigrpo_models::Format, speakers: BTreeMap<String, usize>) {
    let of = |part: &str| speakers.iter().filter(|(n, _)| n.starts_with(part)).map(|(_, count)| count).sum();
    let counts: [usize; 2] = ["talker.", "token2wav."].map(of);
    assert_eq!(counts, [293, 808]);
    let more = "token2wav.code2wav_dit_model.rotary_embed.inv_freq".to_owned();
    let table = "thinker.audio_tower.audio_bos_eos_token.weight".to_owned();
    for name in speakers.into_keys().chain([more, table]) {
        let name = name.replace("{i}", "0");
        assert_eq!((format.carried(&name), format.published_name(&name)), (Some(name.clone()), None));
    }
    for name in ["thinker.model.norm.weight", "thinker.audio_tower.proj.weight", "mine.weight"] {
        assert_eq!((format.carried(name), format.published_name(name)), (None, Some(name.to_owned())));
    }
}

/// Tensors of a file, to be changed and written back.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn read_tensors(path: &Path) -> Tensors {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors()
        .into_iter()
        .map(|(name, view)| (name, (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        .collect()
}

fn write_tensors(path: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A copy of `qwen2_vl_tied` whose tensors `change` has been at.
fn with_tensors(change: impl FnOnce(&mut Tensors)) -> TempDir {
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint("qwen2_vl_tied"), dir.path());
    let path = dir.path().join("model.safetensors");
    let mut tensors = read_tensors(&path);
    change(&mut tensors);
    write_tensors(&path, &tensors);
    dir
}

/// A copy of `qwen2_vl_tied` without its weights.
fn without_weights() -> TempDir {
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint("qwen2_vl_tied"), dir.path());
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    dir
}

fn error(dir: &Path) -> String {
    match omnigrpo_testkit::load(dir, WeightDtype::Auto) {
        Ok(_) => panic!("{} loads", dir.display()),
        Err(error) => told(&error),
    }
}

/// The message names the directory and holds each part.
fn assert_refused(dir: &Path, parts: &[&str]) {
    let message = error(dir);
    assert!(message.contains(&dir.display().to_string()), "{message}");
    for part in parts {
        assert!(message.contains(part), "expected {part:?} in: {message}");
    }
}

const UP: &str = "model.layers.1.mlp.up_proj.weight";

#[test]
fn whether_the_head_is_tied_is_told_by_the_tensors() {
    let embed = |tensors: &Tensors| tensors["model.embed_tokens.weight"].clone();
    let same = with_tensors(|t| _ = t.insert("lm_head.weight".into(), embed(t)));
    let model = omnigrpo_testkit::load(same.path(), WeightDtype::Auto).unwrap();
    assert!(model.decoder().tied());
    assert_eq!(logprobs(&model), logprobs(&load("qwen2_vl_tied", WeightDtype::Auto)));

    // config.json says untied: two tensors, equal as yet.
    let path = same.path().join("config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("\"tie_word_embeddings\": true", "\"tie_word_embeddings\": false"))
        .unwrap();
    let model = omnigrpo_testkit::load(same.path(), WeightDtype::Auto).unwrap();
    assert!(!model.decoder().tied());
    assert_eq!(logprobs(&model), logprobs(&load("qwen2_vl_tied", WeightDtype::Auto)));

    // config.json says tied, the file has another head.
    let other = with_tensors(|t| {
        let mut head = embed(t);
        head.2[3] ^= 0x80;
        t.insert("lm_head.weight".into(), head);
    });
    let model = omnigrpo_testkit::load(other.path(), WeightDtype::Auto).unwrap();
    assert!(!model.decoder().tied());
    assert!(model.params().iter().any(|p| p.name() == "lm_head.weight"));
}

#[test]
fn every_tensor_that_does_not_fit_is_listed() {
    let dir = with_tensors(|t| {
        t.remove(UP);
        let bias = t["model.layers.0.self_attn.q_proj.bias"].clone();
        t.insert("model.layers.2.self_attn.q_proj.bias".into(), bias);
        t.get_mut("model.layers.0.mlp.down_proj.weight").unwrap().1.swap(0, 1);
        t.get_mut("visual.blocks.0.norm1.bias").unwrap().2[8..12].copy_from_slice(&f32::NAN.to_le_bytes());
        t.get_mut("model.norm.weight").unwrap().2[..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        let ids = t.get_mut("visual.blocks.1.norm1.bias").unwrap();
        (ids.0, ids.2) = (Dtype::I32, vec![0; ids.2.len()]);
    });
    assert_refused(
        dir.path(),
        &[
            "6 tensors do not fit the qwen2_vl architecture",
            "missing tensor model.layers.1.mlp.up_proj.weight [80, 64]",
            "unknown tensor model.layers.2.self_attn.q_proj.bias",
            "tensor model.layers.0.mlp.down_proj.weight: shape [80, 64], expected [64, 80]",
            "tensor visual.blocks.0.norm1.bias: element 2 is NaN, expected finite numbers",
            "tensor model.norm.weight: element 0 is inf",
            "tensor visual.blocks.1.norm1.bias: dtype I32, expected F32, BF16 or F16",
        ],
    );
}

#[test]
fn long_lists_are_cut_after_twenty_lines() {
    let dir = with_tensors(|t| t.retain(|name, _| name.starts_with("model.")));
    let message = error(dir.path());
    assert_eq!(message.lines().filter(|l| l.contains("missing tensor visual.")).count(), 20, "{message}");
    assert!(message.trim_end().ends_with("more"), "{message}");
}

/// A copy of a checkpoint with the towers below it.
fn copied(name: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint(name), dir.path());
    for tower in ["siglip", "whisper", "bert"] {
        if checkpoint(name).join(tower).is_dir() {
            copy_dir(&checkpoint(name).join(tower), &dir.path().join(tower));
        }
    }
    dir
}

#[test]
fn values_of_a_wrong_type_are_not_missing_values() {
    for (name, file, key, value, said) in [
        (
            "qwen2_5_vl_tied",
            "config.json",
            "/text_config",
            serde_json::json!(5),
            "text_config is 5; expected an object",
        ),
        ("qwen2_5_vl_tied", "config.json", "/vision_config", serde_json::json!([]), "vision_config is []"),
        (
            "qwen2_vl_tied",
            "config.json",
            "/vision_config/hidden_act",
            serde_json::json!(1),
            "hidden_act is 1; expected a string",
        ),
        (
            "qwen2_vl_tied",
            "config.json",
            "/vision_config/mlp_ratio",
            serde_json::json!(4e18),
            "mlp_ratio is 4e18",
        ),
        ("internvl_hf", "config.json", "/vision_config/norm_type", serde_json::json!({}), "norm_type is {}"),
        (
            "internvl_hf",
            "config.json",
            "/vision_config/layer_norm_eps",
            serde_json::json!(1e300),
            "layer_norm_eps is 1",
        ),
        (
            "internvl_hf",
            "config.json",
            "/vision_config/image_size",
            serde_json::json!(1u64 << 31),
            "image_size is 2147483648; expected an integer from 1 to 16384",
        ),
        (
            "humanomni",
            "siglip/config.json",
            "/layer_norm_eps",
            serde_json::json!(1e300),
            "layer_norm_eps is 1",
        ),
        (
            "humanomni",
            "bert/config.json",
            "/hidden_act",
            serde_json::json!(3),
            "hidden_act is 3; expected a string",
        ),
        (
            "humanomni",
            "whisper/config.json",
            "/encoder_layers",
            serde_json::json!(5000),
            "expected an integer from 1 to 1024",
        ),
    ] {
        let dir = copied(name);
        let path = dir.path().join(file);
        let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let (parent, last) = key.rsplit_once('/').unwrap();
        config.pointer_mut(parent).unwrap()[last] = value;
        std::fs::write(&path, config.to_string()).unwrap();
        assert_refused(dir.path(), &[file, said]);
    }
}

/// Most memory that this process has used, bytes.
fn peak_memory() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM:"));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<usize>().ok()).unwrap_or(0) << 10
}

/// Puts `value` in place of every number of `config`, one at a time.
fn with_numbers(config: &serde_json::Value, value: &serde_json::Value) -> Vec<(String, serde_json::Value)> {
    fn paths(value: &serde_json::Value, at: &str, out: &mut Vec<String>) {
        match value {
            serde_json::Value::Object(map) => {
                map.iter().for_each(|(key, value)| paths(value, &format!("{at}/{key}"), out));
            }
            serde_json::Value::Number(_) => out.push(at.to_owned()),
            _ => {}
        }
    }
    let mut keys = Vec::new();
    paths(config, "", &mut keys);
    let change = |key: String| {
        let mut changed = config.clone();
        *changed.pointer_mut(&key).unwrap() = value.clone();
        (key, changed)
    };
    keys.into_iter().map(change).collect()
}

#[test]
fn sizes_of_a_configuration_take_no_memory_before_they_fit_the_weights() {
    let before = peak_memory();
    for name in [
        "qwen2_vl_tied",
        "qwen2_5_vl_untied",
        "qwen3_vl",
        "internvl_hf",
        "internvl_original",
        "aria",
        "smolvlm",
        "humanomni",
        "omni",
        "qwen2_audio",
    ] {
        let towers = ["siglip", "whisper", "bert"].map(|tower| format!("{tower}/config.json"));
        let files: Vec<String> = std::iter::once("config.json".to_owned())
            .chain(towers)
            .filter(|file| checkpoint(name).join(file).is_file())
            .collect();
        for file in files {
            let text = std::fs::read(checkpoint(name).join(&file)).unwrap();
            let config: serde_json::Value = serde_json::from_slice(&text).unwrap();
            let huge = [1u64 << 20, 1 << 24, 1 << 31, 1 << 53, 1 << 62].map(serde_json::Value::from);
            let mut cases: Vec<_> = huge.iter().flat_map(|value| with_numbers(&config, value)).collect();
            for tower in ["vision_config", "text_config", "llm_config"] {
                if config.get(tower).is_some() {
                    let mut changed = config.clone();
                    changed[tower] = serde_json::json!({});
                    cases.push((format!("{tower} = {{}}"), changed));
                }
            }
            let dir = copied(name);
            for (key, config) in cases {
                std::fs::write(dir.path().join(&file), config.to_string()).unwrap();
                // Many keys are no sizes; with those the checkpoint still loads.
                if let Err(error) = omnigrpo_testkit::load(dir.path(), WeightDtype::Auto) {
                    assert!(!error.to_string().is_empty(), "{name} {file} {key}");
                }
            }
        }
    }
    assert!(peak_memory() - before < 1 << 29, "{} bytes more", peak_memory() - before);
}

/// Links to what has no end, and files of a size that nothing needs, are refused unread.
#[cfg(unix)]
#[test]
fn files_without_end_are_not_read() {
    for (of, name) in [
        ("checkpoints/internvl_hf", "preprocessor_config.json"),
        ("checkpoints/qwen2_5_vl_tied", "tokenizer.json"),
        ("checkpoints/qwen2_5_vl_tied", "chat_template.jinja"),
        ("lora/attention", "adapter_config.json"),
        ("lora/attention", "adapter_model.safetensors"),
    ] {
        let dir = TempDir::new().unwrap();
        copy_dir(&golden(of), dir.path());
        std::fs::remove_file(dir.path().join(name)).unwrap();
        std::os::unix::fs::symlink("/dev/zero", dir.path().join(name)).unwrap();
        let error = match name {
            "preprocessor_config.json" => error(dir.path()),
            "tokenizer.json" => told(&omnigrpo_text::Tokenizer::from_dir(dir.path()).unwrap_err()),
            "chat_template.jinja" => told(&omnigrpo_text::ChatTemplate::from_dir(dir.path()).unwrap_err()),
            _ => told(&load("qwen2_vl_untied", WeightDtype::Auto).load_adapter(dir.path()).unwrap_err()),
        };
        assert!(
            error.contains(name) && error.contains("leads to /dev/zero, which is outside"),
            "{name}: {error}"
        );
    }
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint("qwen2_5_vl_untied"), dir.path());
    let index = std::fs::File::create(dir.path().join("model.safetensors.index.json")).unwrap();
    index.set_len(1 << 40).unwrap();
    assert_refused(dir.path(), &["model.safetensors.index.json", "1099511627776 bytes, expected at most"]);
}

#[test]
fn the_configuration_of_a_large_model_beside_small_weights_is_explained() {
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint("qwen2_5_vl_tied"), dir.path());
    let path = dir.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    for (key, value) in [
        ("hidden_size", 8192),
        ("intermediate_size", 29568),
        ("num_hidden_layers", 80),
        ("num_attention_heads", 64),
        ("num_key_value_heads", 8),
        ("vocab_size", 152_064),
    ] {
        config[key] = value.into();
    }
    config["rope_scaling"]["mrope_section"] = serde_json::json!([16, 24, 24]);
    config["vision_config"]["out_hidden_size"] = 8192.into();
    std::fs::write(&path, config.to_string()).unwrap();
    let before = peak_memory();
    assert_refused(dir.path(), &["model.embed_tokens.weight: shape", "expected [152064, 8192]", "and "]);
    assert!(peak_memory() - before < 1 << 28);

    config["vision_config"] = serde_json::json!({"mlp_ratio": 1u64 << 62});
    config["intermediate_size"] = (1u64 << 31).into();
    std::fs::write(&path, config.to_string()).unwrap();
    let bound = "intermediate_size is 2147483648; expected an integer from 1 to 16777216";
    assert_refused(dir.path(), &[bound]);
}

#[test]
fn two_keys_for_one_tensor_are_refused() {
    let dir = with_tensors(|t| {
        let up = t[UP].clone();
        t.insert("model.language_model.layers.1.mlp.up_proj.weight".into(), up);
    });
    assert_refused(dir.path(), &["both have the name model.layers.1.mlp.up_proj.weight"]);
}

#[test]
fn pickles_are_refused() {
    let dir = without_weights();
    assert_refused(dir.path(), &["no model.safetensors and no model.safetensors.index.json"]);
    std::fs::write(dir.path().join("pytorch_model.bin"), b"\x80\x02.").unwrap();
    assert_refused(dir.path(), &["pickle", "pytorch_model.bin", "convert it to safetensors"]);
}

#[test]
fn damaged_files_are_refused() {
    let original = std::fs::read(checkpoint("qwen2_vl_tied").join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(original[..8].try_into().unwrap()) as usize;
    let mut endless = original.clone();
    endless[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    for (what, bytes) in [
        ("half the data", &original[..original.len() / 2]),
        ("one byte less", &original[..original.len() - 1]),
        ("half the header", &original[..header / 2]),
        ("no header", &original[..4]),
        ("nothing", &[]),
        ("a header without end", &endless[..]),
    ] {
        let dir = without_weights();
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let message = error(dir.path());
        assert!(message.contains("model.safetensors cannot be read as safetensors"), "{what}: {message}");
    }
}

#[test]
fn an_index_names_files_of_its_own_directory_only() {
    let index = |file: &str| {
        let dir = without_weights();
        let text = serde_json::json!({ "weight_map": { UP: file } }).to_string();
        std::fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        dir
    };
    for file in ["../evil.safetensors", "/etc/passwd", "shards/a.safetensors", "..", ""] {
        let dir = index(file);
        assert_refused(dir.path(), &[&format!("{file:?}"), "inside the checkpoint directory"]);
    }
    let dir = index("model-00001-of-00002.safetensors");
    assert_refused(dir.path(), &["model-00001-of-00002.safetensors", "No such file"]);
    std::fs::write(dir.path().join("model.safetensors.index.json"), "[]").unwrap();
    assert_refused(dir.path(), &["model.safetensors.index.json"]);
}

#[test]
fn a_shard_that_is_missing_is_named() {
    let dir = TempDir::new().unwrap();
    copy_dir(&checkpoint("qwen2_5_vl_untied"), dir.path());
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    assert_refused(dir.path(), &["model-00002-of-00003.safetensors"]);
}

#[test]
fn configurations_that_cannot_be_used_are_refused() {
    let with_config = |change: &dyn Fn(&mut serde_json::Value)| {
        let dir = TempDir::new().unwrap();
        copy_dir(&checkpoint("qwen2_vl_tied"), dir.path());
        let path = dir.path().join("config.json");
        let mut config = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(&path, config.to_string()).unwrap();
        dir
    };
    type Change = (fn(&mut serde_json::Value), &'static [&'static str]);
    let changes: [Change; 26] = [
        (
            |c| {
                c["model_type"] = "gpt2".into();
                c["architectures"] = serde_json::json!(["GPT2LMHeadModel"]);
            },
            &["\"gpt2\"", "GPT2LMHeadModel", "Qwen/Qwen2-VL-2B-Instruct"],
        ),
        (|c| c["num_key_value_heads"] = 3.into(), &["4 heads", "3 key-value heads"]),
        (
            |c| c["num_hidden_layers"] = 0.into(),
            &["num_hidden_layers is 0", "expected an integer from 1 to 1024"],
        ),
        (|c| c["num_hidden_layers"] = "two".into(), &["num_hidden_layers is \"two\""]),
        (|c| _ = c.as_object_mut().unwrap().remove("vocab_size"), &["vocab_size is missing"]),
        (|c| _ = c.as_object_mut().unwrap().remove("vision_config"), &["vision_config is missing"]),
        (|c| c["use_sliding_window"] = true.into(), &["sliding windows are not supported"]),
        (
            |c| c["rope_scaling"]["mrope_section"] = serde_json::json!([2, 3, 4]),
            &["mrope_section", "sum to 8"],
        ),
        (|c| c["image_token_id"] = 320.into(), &["image_token_id", "vocabulary of 320"]),
        (|c| c["image_token_id"] = "a".into(), &["image_token_id is \"a\"", "vocabulary of 320"]),
        (|c| c["hidden_act"] = "gelu".into(), &["hidden_act", "expected \"silu\""]),
        (|c| c["hidden_act"] = 3.into(), &["hidden_act is 3; expected a string"]),
        (|c| c["rms_norm_eps"] = 1e300.into(), &["rms_norm_eps is 1e300; expected a number from 0 to 1"]),
        (|c| c["rms_norm_eps"] = "1e-6".into(), &["rms_norm_eps is \"1e-6\"; expected a number"]),
        (|c| c["initializer_range"] = (-1).into(), &["initializer_range is -1e0"]),
        (|c| c["vision_config"] = true.into(), &["vision_config is true; expected an object"]),
        (|c| c["vision_config"]["hidden_act"] = false.into(), &["hidden_act is false; expected a string"]),
        (|c| c["vision_config"]["mlp_ratio"] = 1e300.into(), &["mlp_ratio is 1e300"]),
        (|c| c["text_config"] = "x".into(), &["text_config is \"x\"; expected an object"]),
        (|c| c["rope_scaling"] = "yarn".into(), &["rope_scaling is \"yarn\"; expected an object"]),
        (
            |c| c["rope_scaling"]["type"] = "zzz".into(),
            &["rope_scaling is of type \"zzz\"; expected default, mrope, linear, dynamic, yarn or llama3"],
        ),
        (|c| c["rope_scaling"]["rope_type"] = "longrope".into(), &["of type \"longrope\""]),
        (|c| c["rope_scaling"]["type"] = "yarn".into(), &["factor of rope_scaling \"yarn\" is missing"]),
        (
            |c| {
                c["rope_scaling"]["type"] = "linear".into();
                c["rope_scaling"]["factor"] = 0.into();
            },
            &["factor of rope_scaling is 0"],
        ),
        (|c| c["rope_scaling"]["partial_rotary_factor"] = 0.5.into(), &["partial_rotary_factor is 0.5"]),
        (|c| c["rope_theta"] = 0.into(), &["rope_theta is 0"]),
    ];
    for (change, parts) in changes {
        let dir = with_config(&change);
        assert_refused(dir.path(), parts);
    }

    // Missing keys have the defaults of transformers' classes: 8 key-value heads do not fit 4 heads, null stands for 4.
    let without = |key: &'static str| with_config(&|c| _ = c.as_object_mut().unwrap().remove(key));
    assert_refused(without("num_key_value_heads").path(), &["4 heads", "8 key-value heads"]);
    let null = with_config(&|c| c["num_key_value_heads"] = serde_json::Value::Null);
    assert_eq!(Checkpoint::open(null.path()).unwrap().family().architecture().decoder_config().heads.kv, 4);
    let opened = Checkpoint::open(without("rms_norm_eps").path()).unwrap();
    assert_eq!(opened.family().architecture().decoder_config().rms_eps, 1e-5);
    let opened = Checkpoint::open(without("rope_theta").path()).unwrap();
    assert_eq!(opened.family().architecture().decoder_config().rope.theta, 1e6);

    let dir = TempDir::new().unwrap();
    assert_refused(dir.path(), &["no config.json"]);
    std::fs::write(dir.path().join("config.json"), "{").unwrap();
    assert_refused(dir.path(), &["config.json", "does not contain the expected JSON"]);
    std::fs::write(dir.path().join("config.json"), "[]").unwrap();
    assert_refused(dir.path(), &["expected a JSON object"]);
    assert_refused(&dir.path().join("absent"), &["no config.json"]);
}

/// A model that reads text only is of one of three classes, and every layer attends to all rows before it.
#[test]
fn other_text_models_are_refused_by_name() {
    let full = json!(["full_attention", "full_attention"]);
    for (name, keys, parts) in [
        ("qwen2", json!({"use_sliding_window": true}), &["use_sliding_window", "not supported"][..]),
        (
            "qwen3",
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            &["layer_types has \"sliding_attention\" for layer 1", "\"full_attention\""],
        ),
        (
            "llama",
            json!({"layer_types": ["full_attention"]}),
            &["layer_types has 1 entries", "each of 2 layers"],
        ),
        ("llama", json!({"layer_types": "full_attention"}), &["layer_types is not a list"]),
        ("qwen2", json!({"dual_chunk_attention_config": {"chunk_size": 8}}), &["dual-chunk attention"]),
        ("qwen2", json!({"architectures": ["Qwen2ForSequenceClassification"]}), &["Qwen2ForCausalLM"]),
        ("llama", json!({"model_type": "mistral"}), &["model_type is \"mistral\"; only \"llama\""]),
        (
            "qwen3",
            json!({"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]}),
            &["qwen2_moe", "unsupported"],
        ),
        ("qwen3_moe", json!({"decoder_sparse_step": 2}), &["decoder_sparse_step is 2", "1"]),
        ("qwen3_moe", json!({"mlp_only_layers": [1]}), &["mlp_only_layers is [1]", "without experts"]),
        ("qwen3_moe", json!({"norm_topk_prob": false}), &["norm_topk_prob is false", "expected true"]),
        ("qwen3_moe", json!({"num_experts_per_tok": 10}), &["num_experts_per_tok is 10", "only 9"]),
        ("llama", json!({"rope_scaling": {"rope_type": "longrope"}}), &["longrope", "llama3"]),
    ] {
        let dir = copied(name);
        let open = |keys: &serde_json::Value| {
            Checkpoint::open_with(dir.path(), |_| Ok::<_, ModelError>(keys.as_object().unwrap().clone()))
        };
        let message = open(&keys).err().unwrap().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{name}, {keys}: {message}");
        open(&json!({"layer_types": full, "use_sliding_window": false})).unwrap();
    }
}

/// Returns an array `[e, a, b]` as `[e, b, a]`.
fn transposed((dtype, shape, data): &(Dtype, Vec<usize>, Vec<u8>)) -> (Dtype, Vec<usize>, Vec<u8>) {
    let [e, a, b] = shape[..] else { panic!("{shape:?}") };
    let at = |i: usize| (i / (a * b), i / a % b, i % a);
    let number = |(e, column, row): (usize, usize, usize)| 4 * ((e * a + row) * b + column);
    let numbers = (0..e * a * b).map(|i| number(at(i)));
    (*dtype, vec![e, b, a], numbers.flat_map(|n| data[n..n + 4].to_vec()).collect())
}

/// Splits the weights of all experts into the layers of each.
fn with_own_layers(tensors: &mut Tensors) {
    let names: Vec<String> = tensors.keys().filter(|name| name.contains(".experts.")).cloned().collect();
    for name in names {
        let (dtype, shape, data) = transposed(&tensors.remove(&name).unwrap());
        let start = name.split_once(".experts.").unwrap().0;
        let parts: &[&str] =
            if name.contains("gate_up") { &["gate_proj", "up_proj"] } else { &["down_proj"] };
        let [e, n, k] = shape[..] else { panic!("{shape:?}") };
        let (rows, bytes) = (n / parts.len(), data.len() / (e * parts.len()));
        let layers =
            (0..e).flat_map(|e| parts.iter().map(move |part| format!("{start}.experts.{e}.{part}.weight")));
        tensors.extend(
            layers
                .zip(data.chunks_exact(bytes))
                .map(|(name, own)| (name, (dtype, vec![rows, k], own.to_vec()))),
        );
    }
}

/// A copy of a checkpoint whose tensors `change` has been at.
fn changed(name: &str, change: impl FnOnce(&mut Tensors)) -> TempDir {
    let dir = copied(name);
    let path = dir.path().join("model.safetensors");
    let mut tensors = read_tensors(&path);
    change(&mut tensors);
    write_tensors(&path, &tensors);
    dir
}

/// Experts may be one tensor for all, as in published files of Qwen3-VL or transposed as `transformers` saves them, or tensors of their
/// own. A model is saved as its family is published.
#[test]
fn experts_are_read_in_every_form_and_saved_in_the_published_one() {
    let transpose = |tensors: &mut Tensors| {
        let experts = tensors.iter_mut().filter(|(name, _)| name.contains(".experts."));
        experts.for_each(|(_, tensor)| *tensor = transposed(tensor));
    };
    let names = |dir: &Path| read_tensors(&dir.join("model.safetensors")).into_keys().collect::<Vec<_>>();
    let saved = TempDir::new().unwrap();
    let path = |name: &str| saved.path().join(name);
    let published = load("qwen3_vl_moe", WeightDtype::Auto);
    let bits = weight_bits(&published);
    for (form, dir) in [
        ("transposed", changed("qwen3_vl_moe", transpose)),
        ("own layers", changed("qwen3_vl_moe", with_own_layers)),
    ] {
        let model = omnigrpo_testkit::load(dir.path(), WeightDtype::Auto).unwrap();
        assert!(weight_bits(&model) == bits, "{form}");
        model.save_pretrained(&path(form)).unwrap();
        assert_eq!(names(&path(form)), names(&checkpoint("qwen3_vl_moe")), "{form}");
        let again = omnigrpo_testkit::load(&path(form), WeightDtype::Auto).unwrap();
        assert!(weight_bits(&again) == bits, "{form}, saved");
        // The same numbers in bf16, in an outline, and over a model in memory.
        let narrow = |dir: &Path| weight_bits(&omnigrpo_testkit::load(dir, WeightDtype::BFloat16).unwrap());
        assert!(narrow(dir.path()) == narrow(&checkpoint("qwen3_vl_moe")), "{form} in bf16");
        published.load_weights(dir.path()).unwrap();
        let outline = LoadOptions { outline: true, digests: true, ..LoadOptions::default() };
        let outline = Model::load(&Checkpoint::open(dir.path()).unwrap(), &outline).unwrap();
        assert_eq!(outline.params().len(), model.params().len());
    }
    for name in ["internvl3_5_moe_hf", "internvl3_5_moe_original", "qwen3_moe"] {
        let model = load(name, WeightDtype::Auto);
        assert!(model.params().iter().any(|p| p.name().ends_with("layers.1.mlp.experts.gate_up_proj")));
        model.save_pretrained(&path(name)).unwrap();
        assert_eq!(names(&path(name)), names(&checkpoint(name)), "{name}");
        let (own, again) = (read_tensors(&checkpoint(name).join("model.safetensors")), path(name));
        assert!(read_tensors(&again.join("model.safetensors")) == own, "{name}");
    }

    // Errors name what does not fit.
    const OWN: &str = "model.layers.1.mlp.experts.4.up_proj.weight";
    let refused = |change: &dyn Fn(&mut Tensors), parts: &[&str]| {
        let dir = changed("qwen3_moe", change);
        assert_refused(dir.path(), parts);
    };
    refused(&|tensors| drop(tensors.remove(OWN)), &["experts.gate_up_proj", &format!("{OWN} is missing")]);
    refused(
        &|tensors| {
            let (_, shape, _) = tensors.get_mut(OWN).unwrap();
            shape.reverse();
        },
        &["experts.gate_up_proj", &format!("{OWN} has shape [32, 20], expected [20, 32]")],
    );
    refused(
        &|tensors| {
            let (dtype, _, data) = tensors.get_mut(OWN).unwrap();
            (*dtype, *data) = (Dtype::BF16, data.chunks(4).flat_map(|x| x[2..].to_vec()).collect());
        },
        &["experts.gate_up_proj", &format!("{OWN} has another dtype than")],
    );
    refused(
        &|tensors| tensors.get_mut(OWN).unwrap().2[..4].copy_from_slice(&f32::NAN.to_le_bytes()),
        &[&format!("{OWN}: element 0 is NaN")],
    );
    refused(
        &|tensors| {
            let more = tensors[OWN].clone();
            tensors.insert("model.layers.1.mlp.experts.9999999.up_proj.weight".into(), more);
        },
        &["unknown tensor model.layers.1.mlp.experts.9999999.up_proj.weight"],
    );
    // Neither many experts without layers nor empty ones take memory.
    refused(
        &|tensors| {
            let more = tensors[OWN].clone();
            let names = (0..500).map(|i| format!("x{i}.experts.65535.up_proj.weight"));
            tensors.extend(names.map(|name| (name, more.clone())));
        },
        &["unknown tensor x0.experts.65535.up_proj.weight"],
    );
    refused(
        &|tensors| {
            for name in ["x.experts.gate_up_proj", "x.experts.down_proj"] {
                tensors.insert(name.into(), (Dtype::F32, vec![1 << 40, 0, 0], Vec::new()));
            }
        },
        &["unknown tensor x.experts.down_proj"],
    );
    refused(
        &|tensors| {
            let more = tensors[OWN].clone();
            tensors.insert("model.layers.1.mlp.experts.9.up_proj.weight".into(), more);
        },
        &["experts.gate_up_proj", "shape [10, 32, 40], expected [9, 32, 40]"],
    );
}

/// After a checkpoint is opened nothing asks for its `config.json` again: it can be gone.
#[test]
fn the_configuration_is_read_once() {
    for name in [
        "qwen2_5_vl_tied",
        "qwen3_vl",
        "internvl_hf",
        "internvl_original",
        "aria",
        "aria_own",
        "smolvlm",
        "smolvlm_tied",
        "humanomni",
        "omni",
        "omni_thinker",
        "qwen2_audio",
        "qwen3",
    ] {
        let place = TempDir::new().unwrap();
        let dir = place.path().join(name);
        copy_dir(&checkpoint(name), &dir);
        let opened = Checkpoint::open(&dir).unwrap();
        std::fs::remove_file(dir.join("config.json")).unwrap();
        assert!(Checkpoint::open(&dir).is_err());

        let settings = omnigrpo_testkit::rows::settings(MediaSettings::default());
        assert!(!PromptBuilder::open(&opened, settings).unwrap().stops().ids.is_empty());
        let options = LoadOptions::default();
        let outline = Model::load(&opened, &LoadOptions { outline: true, ..options }).unwrap();
        let model = Model::load(&opened, &options).unwrap();
        assert_eq!(outline.params().len(), model.params().len());
        assert_eq!(
            model.reference(ReferencePlace::Memory(model.device())).unwrap().params().len(),
            model.params().len()
        );
        let random = Model::load(&opened, &LoadOptions { random: Some(1), ..options }).unwrap();
        assert_eq!(random.decoder().config(), model.decoder().config());

        // The saved model equals the loaded one.
        let saved = place.path().join("saved");
        model.save_pretrained(&saved).unwrap();
        assert_eq!(
            weight_bits(&omnigrpo_testkit::load(&saved, WeightDtype::Auto).unwrap()),
            weight_bits(&model),
            "{name}"
        );
        if name.starts_with("internvl") {
            let layout = if name.ends_with("hf") { "original" } else { "hf" };
            model.save_as(&place.path().join("other"), layout).unwrap();
            omnigrpo_testkit::load(&place.path().join("other"), WeightDtype::Auto).unwrap();
        }
    }
}

#[test]
fn the_family_is_told_by_config_json_alone() {
    // A directory named after the other family, and an architecture without a model type.
    let root = TempDir::new().unwrap();
    let dir = root.path().join("Qwen2.5-VL-but-not-really");
    copy_dir(&checkpoint("qwen2_vl_tied"), &dir);
    assert_eq!(Checkpoint::open(&dir).unwrap().family().name(), "qwen2_vl");
    let path = dir.join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("model_type");
    std::fs::write(&path, config.to_string()).unwrap();
    assert_eq!(Checkpoint::open(&dir).unwrap().family().name(), "qwen2_vl");
}

#[test]
fn a_random_model_depends_on_its_seed_alone() {
    let opened = Checkpoint::open(&checkpoint("qwen2_5_vl_untied")).unwrap();
    let random =
        |seed| Model::load(&opened, &LoadOptions { random: Some(seed), ..LoadOptions::default() }).unwrap();
    let (a, again, b) = (random(1), random(1), random(2));
    assert_eq!(weight_bits(&a), weight_bits(&again));
    let up = |model: &Model| weight_bits(model)[UP].clone();
    assert_ne!(up(&a), up(&b));
    // initializer_range 0.02 over 80 x 64 numbers: mean and deviation within four standard errors.
    let values: Vec<f64> = up(&a).iter().map(|&bits| f64::from(f32::from_bits(bits))).collect();
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let deviation = (values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n).sqrt();
    assert!(mean.abs() <= 4.0 * 0.02 / n.sqrt(), "{mean}");
    assert!((deviation / 0.02 - 1.0).abs() <= 4.0 / (2.0 * n).sqrt(), "{deviation}");
}

#[test]
fn a_reference_shares_what_is_frozen_and_copies_what_is_trained() {
    let model = load("qwen2_vl_untied", WeightDtype::Auto);
    for param in model.params() {
        param.set_trainable(param.part() == Part::Llm);
    }
    let reference = model.reference(ReferencePlace::Memory(model.device())).unwrap();
    assert_eq!(weight_bits(&reference), weight_bits(&model));
    let before = weight_bits(&reference);
    for (ours, theirs) in model.params().iter().zip(reference.params()) {
        assert!(!theirs.trainable() || Arc::ptr_eq(ours, theirs));
        assert_eq!(Arc::ptr_eq(ours, theirs), ours.part() != Part::Llm, "{}", ours.name());
        if ours.trainable() {
            ours.store(&vec![0.25; ours.len()]).unwrap();
        }
    }
    assert_eq!(weight_bits(&reference), before);
}

#[test]
fn loading_other_shapes_over_a_model_is_an_error() {
    let model = load("qwen2_vl_tied", WeightDtype::Auto);
    let result = model.load_weights(&checkpoint("qwen2_5_vl_tied"));
    assert!(matches!(result, Err(ModelError::Checkpoint { .. })), "{result:?}");
}

/// A saved directory contains what others need to load it, and the template is where processors look for it.
#[test]
fn companions_are_copied_and_the_template_is_a_file() {
    let folder = TempDir::new().unwrap();
    let (source, saved) = (folder.path().join("source"), folder.path().join("saved"));
    copy_dir(&checkpoint("qwen2_vl_untied"), &source);
    let more = ["modeling_mine.py", "sentencepiece.bpe.model", "additional_chat_templates/tools.jinja"];
    std::fs::create_dir(source.join("additional_chat_templates")).unwrap();
    for name in more {
        std::fs::write(source.join(name), name).unwrap();
    }
    std::fs::write(source.join("pytorch_model.bin"), "x").unwrap();
    let config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(source.join("tokenizer_config.json")).unwrap()).unwrap();
    let mut model = omnigrpo_testkit::load(&source, WeightDtype::Auto).unwrap();
    model.save_trained(&saved).unwrap();
    let text = |name: &str| std::fs::read_to_string(saved.join(name)).unwrap();
    for name in more {
        assert_eq!(text(name), name);
    }
    assert!(!saved.join("pytorch_model.bin").exists());
    assert_eq!(text("chat_template.jinja"), config["chat_template"].as_str().unwrap());

    // An adapter brings the same files, and names its base by its path.
    let (rank, alpha, targets) = (2, 4.0, vec!["q_proj".to_owned()]);
    model.add_lora(&LoraConfig { rank, alpha, dropout: 0.0, rslora: false, targets, seed: 3 }).unwrap();
    let adapter = folder.path().join("adapter");
    model.save_trained(&adapter).unwrap();
    assert!(adapter.join("chat_template.jinja").is_file() && adapter.join("modeling_mine.py").is_file());
    let config = std::fs::read_to_string(adapter.join("adapter_config.json")).unwrap();
    let config: serde_json::Value = serde_json::from_str(&config).unwrap();
    assert_eq!(
        (&config["base_model_name_or_path"], &config["revision"]),
        (&source.canonicalize().unwrap().to_str().unwrap().into(), &serde_json::Value::Null)
    );

    // A template of its own is left as it is.
    let own = folder.path().join("own");
    load("qwen2_vl_tied", WeightDtype::Auto).save_pretrained(&own).unwrap();
    assert!(own.join("chat_template.json").is_file() && !own.join("chat_template.jinja").exists());
}

/// Links may stand for files of the checkpoint or for the blobs of its cache entry. One that leads elsewhere is named before
/// anything is read, and nothing is copied through it.
#[cfg(unix)]
#[test]
fn links_that_lead_out_of_a_checkpoint_are_refused() {
    use std::os::unix::fs::symlink;
    let place = TempDir::new().unwrap();
    let (root, model) = (place.path().canonicalize().unwrap(), place.path().join("model"));
    std::fs::create_dir(root.join("model")).unwrap();
    std::fs::write(root.join("secret"), "a key").unwrap();
    copy_dir(&checkpoint("qwen2_5_vl_tied"), &model);
    let opened = omnigrpo_models::Checkpoint::open(&model).unwrap();
    let loaded = Model::load(&opened, &LoadOptions::default()).unwrap();
    std::fs::create_dir(model.join("additional_chat_templates")).unwrap();
    for name in ["LICENSE", "modeling.py", "additional_chat_templates/rag.jinja", "README.md"] {
        let link = model.join(name);
        symlink(root.join("secret"), &link).unwrap();
        let said = format!("leads to {}", root.join("secret").display());
        let error = error(&model);
        assert!(error.contains(name) && error.contains(&said), "{name}: {error}");
        if name != "README.md" {
            let error = told(&loaded.save_pretrained(&root.join("out")).unwrap_err());
            assert!(error.contains(name) && error.contains(&said), "{name}: {error}");
            assert!(!root.join("out").join(name).exists());
            let error = omnigrpo_models::source_digest(&model).map(drop).map_err(|e| told(&e));
            assert_eq!(error.is_err(), name == "LICENSE", "{name}: {error:?}");
        }
        std::fs::remove_file(link).unwrap();
    }
    // Weights too, and what an index names.
    for name in ["config.json", "model.safetensors"] {
        std::fs::rename(model.join(name), root.join(name)).unwrap();
        symlink(root.join(name), model.join(name)).unwrap();
        assert_refused(&model, &[name, "which is outside of"]);
        std::fs::remove_file(model.join(name)).unwrap();
        std::fs::rename(root.join(name), model.join(name)).unwrap();
    }
    // A link that stays inside, and the layout of a hub cache.
    std::fs::rename(model.join("tokenizer.json"), model.join("other.json")).unwrap();
    symlink("other.json", model.join("tokenizer.json")).unwrap();
    let entry = root.join("models--org--name");
    std::fs::create_dir_all(entry.join("blobs")).unwrap();
    std::fs::create_dir_all(entry.join("snapshots/0123")).unwrap();
    for (at, file) in std::fs::read_dir(&model).unwrap().enumerate() {
        let file = file.unwrap();
        if file.path().is_file() {
            std::fs::copy(file.path(), entry.join(format!("blobs/{at}"))).unwrap();
            symlink(format!("../../blobs/{at}"), entry.join("snapshots/0123").join(file.file_name()))
                .unwrap();
        }
    }
    for dir in [model, entry.join("snapshots/0123")] {
        let opened = omnigrpo_models::Checkpoint::open(&dir).unwrap();
        let out = dir.with_extension("out");
        Model::load(&opened, &LoadOptions::default()).unwrap().save_pretrained(&out).unwrap();
        assert!(
            std::fs::symlink_metadata(out.join("tokenizer.json")).unwrap().is_file(),
            "a file and no link"
        );
    }
}
