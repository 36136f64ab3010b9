//! Golden files: reading and comparing.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use omnigrpo_media::qwen_vl::PatchGrid;
use omnigrpo_models::{
    Checkpoint, DecoderInput, FeatureGradients, GroupStream, LoadOptions, LoraConfig, MediumInput,
    MediumShape, Memories, Model, PackedStream, Position, Prompt, Training, WeightDtype,
};
use omnigrpo_ops::{AttentionLayout, Card, Device, Param, Tape};
use omnigrpo_text::{MediumKind, Span};
use safetensors::{Dtype, SafeTensors};

use crate::golden::golden;

/// Checkpoints of the cases in `cases/`.
pub const CHECKPOINTS: [&str; 2] = ["qwen2_vl_tied", "qwen2_5_vl_tied"];
/// One of each family and of each kind of decoder and tower, with a case of [`case_prompt`].
pub const FAMILIES: [(&str, &str); 17] = [
    ("qwen2_vl_tied", "C"),
    ("qwen2_5_vl_untied", "E"),
    ("qwen3_vl", "E"),
    ("qwen3_vl_moe", "E"),
    ("qwen3_5", "E"),
    ("internvl_hf", "C"),
    ("internvl_rms_hf", "C"),
    ("internvl3_5_hf", "C"),
    ("aria", "E"),
    ("smolvlm", "E"),
    ("humanomni", "va"),
    ("omni", "H"),
    ("qwen2_audio", "C"),
    ("qwen2", "B"),
    ("qwen3", "B"),
    ("qwen3_5_text", "B"),
    ("llama", "B"),
];
/// Models that read text only. They have results for case B.
pub const TEXTS: [&str; 4] = ["qwen2", "qwen3", "qwen3_moe", "llama"];
/// One of each Qwen-VL.
pub const QWENS: [&str; 3] = ["qwen2_vl_tied", "qwen2_5_vl_tied", "qwen3_vl"];

/// Opens a checkpoint and loads it.
pub fn load(dir: &Path, dtype: WeightDtype) -> omnigrpo_models::Result<Model> {
    Model::load(&Checkpoint::open(dir)?, &LoadOptions { dtype, ..LoadOptions::default() })
}

/// Loads a stored checkpoint with the types of its files.
pub fn model_of(name: &str) -> Model {
    load(&checkpoint(name), WeightDtype::Auto).unwrap()
}

pub fn checkpoint(name: &str) -> PathBuf {
    golden("checkpoints").join(name)
}

/// The emulator of a card, or the card that `OMNIGRPO_TEST_CARD` names (tools/gpu/first-contact).
pub fn card() -> Device {
    let Ok(card) = std::env::var("OMNIGRPO_TEST_CARD") else { return Device::emulator().unwrap() };
    static OPEN: std::sync::OnceLock<Card> = std::sync::OnceLock::new();
    let folders = ["/usr/local/cuda", "/usr/local", "/usr"].map(Into::into);
    let cache = std::env::temp_dir().join("omnigrpo-kernels");
    let open = || Card::open(card.parse().unwrap(), &folders, &cache).unwrap();
    Device::Gpu(*OPEN.get_or_init(open))
}

/// A safetensors file as f32 and i64 arrays.
pub struct Golden {
    pub f: BTreeMap<String, Vec<f32>>,
    pub i: BTreeMap<String, Vec<i64>>,
    pub u: BTreeMap<String, Vec<u8>>,
    pub shapes: HashMap<String, Vec<usize>>,
}

impl Golden {
    pub fn read(path: &str) -> Self {
        let bytes = std::fs::read(golden(path)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut this =
            Self { f: BTreeMap::new(), i: BTreeMap::new(), u: BTreeMap::new(), shapes: HashMap::new() };
        for (name, view) in file.tensors() {
            this.shapes.insert(name.clone(), view.shape().to_vec());
            let data = view.data();
            match view.dtype() {
                Dtype::F32 => {
                    let data = data.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
                    this.f.insert(name, data);
                }
                Dtype::I64 => {
                    let data = data.as_chunks::<8>().0.iter().map(|&b| i64::from_le_bytes(b)).collect();
                    this.i.insert(name, data);
                }
                Dtype::U8 => {
                    this.u.insert(name, data.to_vec());
                }
                other => panic!("{name}: {other:?}"),
            }
        }
        this
    }

    pub fn ids(&self, name: &str) -> Vec<u32> {
        self.i[name].iter().map(|&x| u32::try_from(x).unwrap()).collect()
    }

    fn grids(&self, name: &str) -> Vec<PatchGrid> {
        let list = self.i.get(name).cloned().unwrap_or_default();
        list.chunks(3).map(|g| PatchGrid { t: g[0] as usize, h: g[1] as usize, w: g[2] as usize }).collect()
    }
}

const MEAN: [f32; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const STD: [f32; 3] = [0.268_629_54, 0.261_302_6, 0.275_777_1];
const IMAGE: u32 = 302;
const VIDEO: u32 = 303;

/// The prompt of a case, with positions as this program computes them.
pub fn case_prompt(case: &str, model: &Model) -> Prompt {
    match model.family().name() {
        name @ ("qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_text") => {
            return crate::rows::prompt_of("qwen3_vl", &checkpoint(name), case);
        }
        "aria" => return crate::rows::prompt_of("aria", model.dir(), case),
        "smolvlm" => return crate::rows::prompt_of("smolvlm", model.dir(), case),
        "qwen2_5_omni" => return crate::rows::prompt_of("qwen_omni", model.dir(), case),
        "qwen2_audio" => return crate::rows::prompt_of("qwen_audio", model.dir(), case),
        name if name.starts_with("internvl") => return crate::rows::prompt_of("internvl", model.dir(), case),
        "humanomni" => return omni_prompt(&Golden::read(&format!("humanomni/{case}.humanomni.safetensors"))),
        _ => {}
    }
    let inputs = Golden::read(&format!("cases/{case}.safetensors"));
    let pixels = if case == "D2" {
        Golden::read("cases/D1.safetensors")
    } else {
        Golden::read(&format!("cases/{case}.safetensors"))
    };
    let value = |k: usize, u: u8| {
        if case == "A" {
            return (f32::from(u) - 128.0) / 64.0;
        }
        let c = k / 392;
        ((f64::from(u) * (1.0 / 255.0)) as f32 - MEAN[c]) / STD[c]
    };
    let rows = |name: &str| -> Vec<f32> {
        let bytes = pixels.u.get(name).cloned().unwrap_or_default();
        bytes.iter().enumerate().map(|(i, &u)| value(i % 1176, u)).collect()
    };
    let (images, videos) = (rows("image_u8"), rows("video_u8"));
    let mut image_grids = inputs.grids("image_grid").into_iter();
    let mut video_grids = inputs
        .grids("video_grid")
        .into_iter()
        .zip(inputs.f.get("second_per_grid").cloned().unwrap_or_default());
    let ids = inputs.ids("prompt_ids");
    let (mut image_at, mut video_at) = (0, 0);
    let mut media = Vec::new();
    let mut spans = Vec::new();
    let mut at = 0;
    while at < ids.len() {
        let (kind, grid, seconds, source, offset) = match ids[at] {
            IMAGE => (MediumKind::Image, image_grids.next().unwrap(), 0.0, &images, &mut image_at),
            VIDEO => {
                let (grid, seconds) = video_grids.next().unwrap();
                (MediumKind::Video, grid, seconds, &videos, &mut video_at)
            }
            _ => {
                at += 1;
                continue;
            }
        };
        let len = grid.num_patches() * 1176;
        let tokens = grid.num_tokens(2);
        spans.push(Span { medium: media.len(), start: at, len: tokens });
        media.push(Arc::new(MediumInput {
            kind,
            shape: MediumShape::Patches(grid),
            data: source[*offset..*offset + len].to_vec(),
            seconds_per_grid: f64::from(seconds),
            frame_times_secs: Vec::new(),
            of_clip: None,
        }));
        *offset += len;
        at += tokens;
    }
    let (positions, next_position) = model.family().processor().positions(ids.len(), &spans, &media).unwrap();
    Prompt { ids, spans, positions, next_position, media, instruction: Vec::new(), text: String::new() }
}

/// The prompt of a case of `humanomni/`, its media from the golden file.
pub fn omni_prompt(want: &Golden) -> Prompt {
    let levels = |u: &u8| ((f64::from(*u) * (1.0 / 255.0)) as f32 - 0.5) / 0.5;
    let picture = |name: &str, kind| {
        let [count, _, height_px, width_px] = want.shapes.get(name)?.as_slice() else { panic!("{name}") };
        let shape = MediumShape::Pictures { count: *count, height_px: *height_px, width_px: *width_px };
        Some((kind, shape, want.u[name].iter().map(levels).collect::<Vec<f32>>()))
    };
    let sound = want.f.get("mel").map(|mel| {
        let [mels, frames] = want.shapes["mel"][..] else { panic!("mel") };
        (MediumKind::Audio, MediumShape::Mel { mels, frames, heard: frames }, mel.clone())
    });
    let media = [picture("image_u8", MediumKind::Image), picture("video_u8", MediumKind::Video), sound];
    let media: Vec<_> = media
        .into_iter()
        .flatten()
        .map(|(kind, shape, data)| {
            Arc::new(MediumInput {
                kind,
                shape,
                data,
                seconds_per_grid: 0.0,
                frame_times_secs: Vec::new(),
                of_clip: None,
            })
        })
        .collect();
    let (all, mut at) = (want.ids("chunk_ids"), 0);
    let features = want.i.get("feature_lengths").cloned().unwrap_or_default();
    let (mut ids, mut spans) = (Vec::new(), Vec::new());
    for (i, &len) in want.i["chunk_lengths"].iter().enumerate() {
        ids.extend_from_slice(&all[at..at + len as usize]);
        at += len as usize;
        if let Some(&len) = features.get(i) {
            spans.push(Span { medium: i, start: ids.len(), len: len as usize });
            ids.resize(ids.len() + len as usize, 0);
        }
    }
    let next_position = ids.len() as u32;
    let positions = (0..next_position).map(|p| [p; 3]).collect();
    Prompt {
        ids,
        spans,
        positions,
        next_position,
        media,
        instruction: want.ids("bert_ids"),
        text: String::new(),
    }
}

/// The largest absolute difference.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

pub fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

/// The 2-norm and eight signed sums of a gradient, as the golden scripts compute them.
pub fn sketch(grad: &[f32]) -> [f64; 9] {
    let mut out = [0.0; 9];
    out[0] = norm(grad);
    for (k, &g) in grad.iter().enumerate() {
        for j in 0..8u32 {
            let mut h = (k as u32).wrapping_mul(0x9E37_79B1).wrapping_add(j.wrapping_mul(0x85EB_CA77));
            h ^= h >> 15;
            h = h.wrapping_mul(0x2C1B_3C6D);
            h ^= h >> 12;
            let sign = if h & (1 << 16) != 0 { -1.0 } else { 1.0 };
            out[1 + j as usize] += sign * f64::from(g);
        }
    }
    out
}

/// Compares every gradient of the model with `{prefix}grad.*` and `{prefix}sketch.*` under the project's rule:
/// ‖Δ‖ ≤ rel · ‖g‖ + 1e-6 · RMS over all tensors. Returns how many were compared.
pub fn check_gradients(model: &Model, golden: &Golden, prefix: &str, rel: f64) -> usize {
    check_gradients_of(model.params(), golden, prefix, rel)
}

/// Checks gradients as [`check_gradients`] does, of these weights.
pub fn check_gradients_of(params: &[Arc<Param>], golden: &Golden, prefix: &str, rel: f64) -> usize {
    let norms: Vec<f64> = golden
        .f
        .iter()
        .filter(|(name, _)| name.starts_with(&format!("{prefix}sketch.")))
        .map(|(_, s)| f64::from(s[0]))
        .collect();
    assert!(!norms.is_empty(), "no gradients under {prefix}");
    let rms = (norms.iter().map(|n| n * n).sum::<f64>() / norms.len() as f64).sqrt();
    let mut compared = 0;
    for param in params {
        let name = param.name();
        let expected = golden.f.get(&format!("{prefix}sketch.{name}"));
        let got = param.grad();
        match (expected, got) {
            (None, None) => {}
            (Some(expected), Some(got)) => {
                let bound = rel * f64::from(expected[0]) + 1e-6 * rms;
                for (i, (a, b)) in sketch(&got).iter().zip(expected).enumerate() {
                    let allowed = if i == 0 { bound } else { 4.0 * bound };
                    // The sketch itself is stored as f32.
                    let allowed = allowed + 1e-6 * f64::from(b.abs());
                    assert!(
                        (a - f64::from(*b)).abs() <= allowed,
                        "{name}: sketch {i} is {a}, expected {b} ± {allowed}"
                    );
                }
                if let Some(expected) = golden.f.get(&format!("{prefix}grad.{name}")) {
                    let delta: Vec<f32> = got.iter().zip(expected).map(|(a, b)| a - b).collect();
                    assert!(norm(&delta) <= bound, "{name}: ‖Δ‖ = {} > {bound}", norm(&delta));
                }
                compared += 1;
            }
            (expected, got) => {
                panic!("{name}: gradient expected: {}, present: {}", expected.is_some(), got.is_some())
            }
        }
    }
    assert_eq!(compared, norms.len(), "some golden gradients name no weight");
    compared
}

/// A pass of the first update.
pub fn training(recompute: bool) -> Training {
    Training { recompute, ..Training::default() }
}

/// Logits of some rows of a plain causal sequence.
pub fn causal_logits(model: &Model, x: DecoderInput, positions: &[Position], rows: &[usize]) -> Vec<f32> {
    let (decoder, pass) = (model.decoder(), model.pass());
    let layout = Arc::new(AttentionLayout::causal(positions.len()).into());
    let rope = decoder.rope_table(positions);
    let hidden = decoder.forward(x, &rope, &layout, rows, &pass, &mut Tape::off()).unwrap();
    decoder.logits(hidden.rows()).unwrap().to_vec()
}

/// Media of a prompt in the order in which they begin.
pub fn in_order(prompt: &Prompt) -> Vec<usize> {
    let mut order = Vec::new();
    for span in &prompt.spans {
        if !order.contains(&span.medium) {
            order.push(span.medium);
        }
    }
    order
}

/// Checks a forward pass against golden results: features of the media if they are given, log-probabilities of the completion, and logits
/// of the rows that score it.
pub fn check_forward(what: &str, model: &Model, mut prompt: Prompt, completion: &[u32], want: &Golden) {
    let features = model.encode_prompt(&prompt).unwrap();
    if let Some(want) = want.f.get("features") {
        let got: Vec<f32> = in_order(&prompt).iter().flat_map(|&m| features[m].rows.to_vec()).collect();
        let d = max_diff(&got, want);
        assert!(d <= 1e-4, "{what}: features differ by {d}");
    }
    let stream =
        PackedStream::new(&[GroupStream { prompt: &prompt, completions: vec![completion] }]).unwrap();
    let logp = model.score(&stream, std::slice::from_ref(&features), 1.0).unwrap().0;
    let d = max_diff(&logp, &want.f["logp"]);
    assert!(d <= 1e-4, "{what}: log-probabilities differ by {d}");
    let first = prompt.ids.len() - 1;
    for &id in &completion[..completion.len() - 1] {
        prompt.ids.push(id);
        prompt.positions.push([prompt.next_position; 3]);
        prompt.next_position += 1;
    }
    let x = model.embed_prompt(&prompt, &features).unwrap();
    let rows: Vec<usize> = (first..first + completion.len()).collect();
    let d = max_diff(&causal_logits(model, x, &prompt.positions, &rows), &want.f["logits"]);
    assert!(d <= 1e-4, "{what}: logits differ by {d}");
}

/// Gradients by name; weights that nothing reached are left out.
pub type Gradients = BTreeMap<String, Vec<f32>>;

/// Takes every gradient out of the model.
pub fn take_gradients(model: &Model) -> Gradients {
    let taken = model.params().iter().filter_map(|param| {
        let grad = param.grad()?;
        param.clear_grad();
        Some((param.name().to_owned(), grad))
    });
    taken.collect()
}

/// Asserts the project's rule for two ways to one gradient: the same weights are reached, and for each
/// ‖Δ‖ ≤ rel · ‖g‖ + 1e-6 · RMS over all tensors.
pub fn assert_close(got: &Gradients, expected: &Gradients, rel: f64, what: &str) {
    assert!(!expected.is_empty(), "{what}: no gradients");
    assert!(got.keys().eq(expected.keys()), "{what}: gradients of different weights");
    let squares: f64 = expected.values().map(|g| norm(g).powi(2)).sum();
    let rms = (squares / expected.len() as f64).sqrt();
    for (name, want) in expected {
        let delta: Vec<f32> = got[name].iter().zip(want).map(|(a, b)| a - b).collect();
        let bound = rel * norm(want) + 1e-6 * rms;
        assert!(norm(&delta) <= bound, "{what}: {name}: ‖Δ‖ = {} > {bound}", norm(&delta));
    }
}

/// The bits of a model's weights, by name.
pub fn weight_bits(model: &Model) -> BTreeMap<String, Vec<u32>> {
    let bits = |data: &[f32]| data.iter().map(|x| x.to_bits()).collect();
    model.params().iter().map(|p| (p.name().to_owned(), bits(&p.read().f32()))).collect()
}

/// Copies a directory with those inside it.
pub fn copy_dir(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        let to = to.join(path.file_name().unwrap());
        if path.is_dir() {
            copy_dir(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

/// A random model that is large enough for every kernel to work in several tiles and on several threads.
pub fn larger_model(name: &str) -> Model {
    let dir = larger_checkpoint(name);
    let options = LoadOptions { random: Some(7), ..LoadOptions::default() };
    Model::load(&Checkpoint::open(dir.path()).unwrap(), &options).unwrap()
}

/// Writes the configuration and the other files of [`larger_model`]. The weights of the folder do not fit them.
pub fn larger_checkpoint(name: &str) -> tempfile::TempDir {
    let dir = tempfile::TempDir::new().unwrap();
    copy_dir(&checkpoint(name), dir.path());
    let path = dir.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let text = match config.get("text_config") {
        Some(_) => &mut config["text_config"],
        None => &mut config,
    };
    for (key, size) in
        [("hidden_size", 320), ("intermediate_size", 600), ("vocab_size", 2100), ("head_dim", 64)]
    {
        text[key] = size.into();
    }
    text["num_attention_heads"] = 5.into();
    text["num_key_value_heads"] = 1.into();
    text["initializer_range"] = 0.08.into();
    if name.starts_with("qwen3_5") {
        text["rope_parameters"]["mrope_section"] = serde_json::json!([6, 5, 5]);
        // Heads of the delta rule whose keys and values are wider than a vector, and of unequal width.
        for (key, size) in [("linear_key_head_dim", 40), ("linear_value_head_dim", 72)] {
            text[key] = size.into();
        }
    } else {
        text["rope_scaling"]["mrope_section"] = serde_json::json!([8, 12, 12]);
    }
    let out = if name.starts_with("qwen2_vl") { "hidden_size" } else { "out_hidden_size" };
    config["vision_config"][out] = 320.into();
    std::fs::write(&path, config.to_string()).unwrap();
    dir
}

/// A prompt continued by `tokens` text tokens.
pub fn lengthened(mut prompt: Prompt, tokens: u32) -> Prompt {
    for i in 0..tokens {
        prompt.ids.push(i * 7 % 290);
        prompt.positions.push([prompt.next_position; 3]);
        prompt.next_position += 1;
    }
    prompt
}

/// The replacement of the backward pass reaches, for each of these prompts, the weights that the pass reaches, with zeros.
/// Returns how many these are, by prompt.
pub fn check_reach(model: &Model, prompts: &[Prompt], completion: &[u32]) -> Vec<usize> {
    train_all(model);
    let refs: Vec<&Prompt> = prompts.iter().collect();
    let features: Vec<_> = prompts.iter().map(|p| model.encode_prompt(p).unwrap()).collect();
    let each = |g: usize| {
        let groups = [GroupStream { prompt: refs[g], completions: vec![completion] }];
        let stream = PackedStream::new(&groups).unwrap();
        let pass = model.train_pass(&stream, &features[g..=g], Training::default(), None).unwrap();
        let gradients = pass.backward(&vec![0.0; completion.len()], None).unwrap();
        model
            .backward_media(
                &refs[g..=g],
                &features[g..=g],
                Memories::default(),
                gradients,
                Training::default(),
            )
            .unwrap();
        let passed = take_gradients(model);
        let mut gradients = FeatureGradients::default();
        model.reach_decoder();
        model.reach_media(&refs, &features, &[g], &mut gradients);
        model.backward_media(&refs, &features, Memories::default(), gradients, Training::default()).unwrap();
        let reached = take_gradients(model);
        assert!(reached.keys().eq(passed.keys()), "prompt {g}: other weights");
        assert!(reached.values().chain(passed.values()).flatten().all(|x| *x == 0.0), "prompt {g}");
        reached.len()
    };
    (0..prompts.len()).map(each).collect()
}

/// Trains everything on one completion: adds to all gradients those of the sum of its log-probabilities, each times its
/// coefficient.
pub fn backward(model: &Model, prompt: &Prompt, completion: &[u32], coefficients: &[f32], how: Training) {
    let groups = [GroupStream { prompt, completions: vec![completion] }];
    let stream = PackedStream::new(&groups).unwrap();
    train_all(model);
    let features = [model.encode_prompt(prompt).unwrap()];
    let pass = model.train_pass(&stream, &features, how, None).unwrap();
    let gradients = pass.backward(coefficients, None).unwrap();
    model.backward_media(&[prompt], &features, Memories::default(), gradients, how).unwrap();
}

/// Adapters of rank 4 that have begun to learn, and nothing else that is trained.
pub fn train_adapters(model: &mut Model, targets: &[&str]) {
    let targets = targets.iter().map(|target| (*target).to_owned()).collect();
    let lora = LoraConfig { rank: 4, alpha: 8.0, dropout: 0.0, rslora: false, targets, seed: 3 };
    model.add_lora(&lora).unwrap();
    model.params().iter().for_each(|p| p.set_trainable(false));
    for param in model.adapter_params() {
        param.set_trainable(true);
        param.update(|w| w.iter_mut().for_each(|w| *w += 0.01)).unwrap();
    }
}

/// Selects every weight.
pub fn train_all(model: &Model) {
    for param in model.params() {
        param.set_trainable(true);
        param.clear_grad();
    }
}
