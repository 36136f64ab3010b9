//! Times a random model on a device: products and attention alone, a training pass with its optimizer step, and
//! decoding. Writes one line of JSON for each; tools/gpu/first-contact builds a page from them.
//!
//! Usage: `gpu DEVICE CONFIG_DIR PROMPT_TOKENS COMPLETIONS COMPLETION_TOKENS`, with `cuda:N`, `cpu` or `emulated` as
//! device and a directory with the `config.json` of a family; no weights are needed.
#![allow(clippy::print_stdout, missing_docs)]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use omnigrpo_models::{
    Checkpoint, GroupStream, LoadOptions, Model, PackedStream, Prompt, Training, WeightDtype,
};
use omnigrpo_ops::{
    AttentionLayout, Card, DecodeRows, Device, DrawFrom, Linear, Moments, Norm, PackedLinear, Param, Part,
    Rows, Sampler, Step, Values, squares,
};
use serde_json::{Value, json};

type Error = Box<dyn std::error::Error>;

/// Products in the attention of a row with the keys that it sees: forward, and backward in the two kernels for queries and for keys.
const ATTENTION_PRODUCTS: [f64; 2] = [2.0, 3.0 + 4.0];

/// Inner width of the tower of Qwen2.5-VL, whose rows do not begin at multiples of 16 bytes, and the next one whose rows do.
const TOWER: [usize; 2] = [3420, 3424];

fn device(name: &str) -> Result<Device, Error> {
    match name.strip_prefix("cuda:") {
        Some(ordinal) => {
            let roots = ["CUDA_HOME", "VIRTUAL_ENV"].iter().filter_map(std::env::var_os).map(PathBuf::from);
            let roots: Vec<_> =
                roots.chain(["/usr/local/cuda", "/usr/local", "/usr"].map(PathBuf::from)).collect();
            Ok(Device::Gpu(Card::open(
                ordinal.parse()?,
                &roots,
                &std::env::temp_dir().join("omnigrpo-kernels"),
            )?))
        }
        None if name == "emulated" => Device::emulator().ok_or_else(|| "this build has no emulator".into()),
        None => Ok(Device::Cpu),
    }
}

/// Returns the shortest of several times, in seconds, after a run that compiles kernels and fills memory pools.
fn least<T>(device: Device, runs: usize, mut f: impl FnMut() -> Result<T, Error>) -> Result<f64, Error> {
    let mut best = f64::INFINITY;
    for run in 0..=runs {
        device.finish()?;
        let started = Instant::now();
        drop(f()?);
        device.finish()?;
        if run > 0 {
            best = best.min(started.elapsed().as_secs_f64());
        }
    }
    Ok(best)
}

fn numbers(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i % 13) as f32 * 0.01 - 0.06).collect()
}

/// Returns rows like the output of a norm with a bf16 weight: bf16 on a GPU.
fn normed(device: Device, rows: usize, cols: usize) -> Result<Rows, Error> {
    let weight = Param::new("norm", Part::Llm, &[cols], Values::F32(vec![1.0; cols]).into_bf16())?;
    let x = Rows::upload(device, numbers(rows * cols), rows, cols)?;
    Ok(Norm::Rms { weight: Arc::new(weight), eps: 1e-6 }.forward(&x)?.0)
}

fn told(what: &str, value: Value) {
    println!("{}", json!({ "what": what, "is": value }));
}

fn main() -> Result<(), Error> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [name, config, sizes @ ..] = &args[..] else {
        return Err("usage: gpu DEVICE CONFIG_DIR PROMPT_TOKENS COMPLETIONS COMPLETION_TOKENS".into());
    };
    let sizes = sizes.iter().map(|size| size.parse()).collect::<Result<Vec<usize>, _>>()?;
    let &[prompt_tokens, group, tokens] = &sizes[..] else {
        return Err("expected PROMPT_TOKENS, COMPLETIONS and COMPLETION_TOKENS".into());
    };
    let device = device(name)?;
    let options = LoadOptions { dtype: WeightDtype::BFloat16, device, ..LoadOptions::default() };
    let model =
        Model::load(&Checkpoint::open(config.as_ref())?, &LoadOptions { random: Some(1), ..options })?;
    let card = match device {
        Device::Gpu(card) => card.name(),
        other => other.to_string(),
    };
    let count: usize = model.params().iter().map(|p| p.len()).sum();
    told(
        "machine",
        json!({ "device": card, "parameters": count, "prompt": prompt_tokens, "group": group, "tokens": tokens }),
    );
    parts(&model, prompt_tokens + group * (tokens - 1), group)?;
    let [recorded, plain] = [true, false].map(|graphs| decode(&model, prompt_tokens, group, tokens, graphs));
    if recorded? != plain? {
        return Err("recorded steps draw other tokens than kernels that are launched one by one".into());
    }
    train(&model, prompt_tokens, group, tokens)
}

/// Times products and attention of one layer with the rows of a packed stream, and products of a decoding batch. Those are so short
/// that the host's calls around one would take longer. So the products of all layers are queued, which also leaves no weight in a
/// cache.
fn parts(model: &Model, rows: usize, batch: usize) -> Result<(), Error> {
    let (device, pass) = (model.device(), model.pass());
    let layers = model.params().iter().filter(|p| p.name().contains(".layers.0.") && p.part() == Part::Llm);
    for param in layers.filter(|p| p.shape().len() == 2) {
        let &[n, k] = param.shape() else { continue };
        let suffix = param.name().split_once(".layers.0.").map_or("", |(_, suffix)| suffix);
        let same = model.params().iter().filter(|p| p.part() == Part::Llm && p.name().ends_with(suffix));
        let layers = same.map(|p| Linear::new(Arc::clone(p), None)).collect::<Result<Vec<_>, _>>()?;
        for (rows, layers, pass) in
            [(rows, &layers[..1], pass.clone()), (batch, &layers[..], pass.clone().per_row())]
        {
            let products: Vec<_> = layers.iter().map(|layer| PackedLinear::new(&[layer], &pass)).collect();
            let x = normed(device, rows, k)?;
            let all = least(device, 5, || {
                for packed in &products {
                    drop(packed.forward(&x)?);
                }
                Ok(())
            })?;
            let (forward, in_turn) = (all / products.len() as f64, products.len());
            let flops = 2.0 * (rows * n * k) as f64;
            let bytes = 2.0 * (n * k) as f64;
            told(
                "product",
                json!({ "name": param.name(), "rows": rows, "n": n, "k": k, "in_turn": in_turn, "secs": forward, "flops": flops, "bytes": bytes }),
            );
            if rows != batch {
                let packed = &products[0];
                let dy = packed.forward(&x)?;
                param.set_trainable(true);
                let backward = least(device, 5, || Ok(packed.backward(&x, &dy)?))?;
                param.clear_grad();
                param.set_trainable(false);
                told(
                    "product, backward",
                    json!({ "name": param.name(), "rows": rows, "n": n, "k": k, "secs": backward, "flops": 2.0 * flops }),
                );
            }
        }
    }
    for k in TOWER {
        let (n, name) = (1280, format!("of {} bytes a row", 2 * k));
        let values = Values::F32(numbers(n * k)).into_bf16();
        let layer = Linear::new(Arc::new(Param::new("tower", Part::Vision, &[n, k], values)?), None)?;
        let (x, packed) = (normed(device, rows, k)?, PackedLinear::new(&[&layer], &pass));
        let secs = least(device, 5, || Ok(packed.forward(&x)?))?;
        let flops = 2.0 * (rows * n * k) as f64;
        told(
            "product of a tower",
            json!({ "name": name, "rows": rows, "n": n, "k": k, "secs": secs, "flops": flops }),
        );
    }
    let heads = model.decoder().config().heads;
    let width = heads.packed_width();
    let qkv = normed(device, rows, width)?;
    let layout = Arc::new(AttentionLayout::causal(rows).into());
    let (out, lse) = heads.forward(&qkv, &layout)?;
    let forward = least(device, 5, || Ok(heads.forward(&qkv, &layout)?))?;
    let backward = least(device, 5, || Ok(heads.backward(&qkv, &out, &lse, &out, &layout)?))?;
    // A row sees half of the rows, on average.
    let [of_forward, of_backward] =
        ATTENTION_PRODUCTS.map(|products| products * (rows * rows * heads.q * heads.dim) as f64);
    told("attention", json!({ "rows": rows, "secs": forward, "flops": of_forward }));
    told("attention, backward", json!({ "rows": rows, "secs": backward, "flops": of_backward }));
    Ok(())
}

fn prompt(tokens: usize) -> Prompt {
    Prompt {
        ids: (0..tokens as u32).map(|i| 3 + i % 50).collect(),
        spans: Vec::new(),
        positions: (0..tokens as u32).map(|i| [i; 3]).collect(),
        next_position: tokens as u32,
        media: Vec::new(),
        instruction: Vec::new(),
        text: String::new(),
    }
}

/// Times decoding of a group, one token each per step: prefill, and the steps after the first few. Returns the tokens of each step.
fn decode(
    model: &Model,
    prompt_tokens: usize,
    group: usize,
    tokens: usize,
    graphs: bool,
) -> Result<Vec<Vec<u32>>, Error> {
    let (decoder, pass, prompt) = (model.decoder(), model.pass(), prompt(prompt_tokens));
    let sampler = Sampler::default();
    let mut cache = decoder.cache(prompt_tokens, group, tokens, &pass)?;
    let started = Instant::now();
    let x = decoder.embed(&prompt.ids, &pass)?;
    decoder.prefill(x, &decoder.rope_table(&prompt.positions), &mut cache, &pass, None)?;
    model.device().finish()?;
    told("prefill", json!({ "rows": prompt_tokens, "secs": started.elapsed().as_secs_f64() }));
    let mut next = decoder.next_tokens(sampler, &pass);
    if !graphs {
        next = next.plain();
    }
    let (mut ids, mut times, mut all) = (vec![7; group], Vec::new(), Vec::new());
    for step in 0..tokens {
        let started = Instant::now();
        let positions = vec![[(prompt_tokens + step) as u32; 3]; group];
        let rows = DecodeRows { slots: (0..group).collect(), cache: &mut cache };
        let from: Vec<_> = (0..group)
            .map(|row| DrawFrom {
                seen: [&[], &[]],
                forbids: false,
                uniform: (row as f64 + 0.5) / group as f64,
            })
            .collect();
        let drawn = next.next(vec![rows], ids, &positions, &from, None)?;
        ids = drawn.iter().map(|draw| draw.map_or(0, |draw| draw.id)).collect();
        all.push(ids.clone());
        times.push(started.elapsed().as_secs_f64());
    }
    model.device().finish()?;
    times.sort_by(f64::total_cmp);
    let weights: usize = model.params().iter().filter(|p| p.part() == Part::Llm).map(|p| p.num_bytes()).sum();
    let embedding = if decoder.tied() { 0 } else { decoder.embedding().num_bytes() };
    let config = decoder.config();
    // Keys and values in bf16: the prompt's once, and on average half of the completions'.
    let cached = 4 * config.heads.kv_width() * config.layers * (prompt_tokens + group * tokens / 2);
    let replays = next.replays();
    told(
        if graphs { "decode" } else { "decode, launched one by one" },
        json!({ "replayed": replays.map(|r| r.replayed), "refused": replays.and_then(|r| r.refused.clone()), "rows": group, "steps": tokens, "median_secs": times[times.len() / 2], "bytes": weights - embedding + cached }),
    );
    Ok(all)
}

/// Times a policy pass over the packed group, forward and backward, and an optimizer step of all weights of the
/// language model.
fn train(model: &Model, prompt_tokens: usize, group: usize, tokens: usize) -> Result<(), Error> {
    let (device, prompt) = (model.device(), prompt(prompt_tokens));
    let llm: Vec<_> = model.params().iter().filter(|p| p.part() == Part::Llm).collect();
    llm.iter().for_each(|p| p.set_trainable(true));
    let completion: Vec<u32> = (0..tokens as u32).map(|i| 5 + i % 40).collect();
    let groups = [GroupStream { prompt: &prompt, completions: vec![&completion[..]; group] }];
    let stream = PackedStream::new(&groups)?;
    let training = Training::default();
    let dlogp: Vec<f32> = (0..group * tokens).map(|i| (i as f32).sin() / (group * tokens) as f32).collect();
    let pass = || -> Result<(), Error> {
        model.train_pass(&stream, &[Vec::new()], training, None)?.backward(&dlogp, None)?;
        Ok(())
    };
    let secs = least(device, 2, pass)?;
    let rows = prompt_tokens + group * (tokens - 1);
    let (config, decoder) = (model.decoder().config(), model.decoder());
    let linear: usize = llm.iter().filter(|p| p.shape().len() == 2).map(|p| p.len()).sum();
    // The head has the shape of the embedding, and only rows with targets reach it.
    let head = decoder.embedding().len();
    let layers = linear - if decoder.tied() { head } else { 2 * head };
    let products = 6.0 * (layers * rows + head * group * tokens) as f64;
    // A row sees the prompt and on average half of its completion.
    let seen = (prompt_tokens * prompt_tokens / 2 + group * tokens * (prompt_tokens + tokens / 2)) as f64;
    let products_of_attention: f64 = ATTENTION_PRODUCTS.iter().sum();
    let attention =
        2.0 * products_of_attention * seen * (config.heads.q * config.heads.dim * config.layers) as f64;
    told("policy", json!({ "rows": rows, "secs": secs, "flops": products + attention }));
    let weights: usize = llm.iter().map(|p| p.len()).sum();
    let room = match device {
        Device::Gpu(card) => card.memory().map_or(0, |[_, total]| total),
        _ => main_memory(),
    };
    // Weight, rest of the master, moments and gradient take 16 bytes.
    let resident = Place { what: "optimizer", of: "memory of the GPU", needed: 16 * weights, room };
    optimizer(&llm, device, &pass, &resident, false)?;
    if device == Device::Cpu {
        return Ok(());
    }
    // Master, moments and gradient take 16 bytes.
    let (of, room) = ("main memory", main_memory());
    let offloaded = Place { what: "optimizer, offloaded", of, needed: 16 * weights, room };
    optimizer(&llm, device, &pass, &offloaded, true)
}

/// Memory of an optimizer's state.
struct Place {
    /// Name of the measurement.
    what: &'static str,
    /// Name of the memory.
    of: &'static str,
    /// Bytes that the state needs, with what else it is stored with.
    needed: usize,
    /// Bytes that exist.
    room: usize,
}

/// Returns the bytes of main memory that are free, or 0 if the system does not report them.
fn main_memory() -> usize {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).map_or(0, |kib: usize| 1024 * kib)
}

/// Times the second of two optimizer steps; the first allocates the state. Reports it if the state does not fit.
fn optimizer(
    llm: &[&Arc<Param>],
    device: Device,
    pass: &dyn Fn() -> Result<(), Error>,
    &Place { what, of, needed, room }: &Place,
    offload: bool,
) -> Result<(), Error> {
    // Activations and allocators need some room, too.
    if needed + needed / 8 > room {
        let [needed, room] = [needed, room].map(|bytes| bytes as f64 / 1e9);
        let why = format!("the {what} needs {needed:.0} GB of {of} and some more, of {room:.0} GB");
        told(what, json!({ "skipped": why }));
        return Ok(());
    }
    let mut moments: Vec<Moments> = llm.iter().map(|_| Moments::default()).collect();
    let step = Step {
        lr: 1e-6,
        betas: [0.9, 0.999],
        eps: 1e-8,
        weight_decay: 0.0,
        grad_scale: 1.0,
        master: true,
        random: false,
        eight_bits: false,
        offload,
    };
    let all: Vec<&Param> = llm.iter().map(|param| &***param).collect();
    let (mut updated, mut turns) = (0, Vec::new());
    for _ in 0..2 {
        if offload {
            // A run sends the gradients of linear layers during its last pass, and the others while the CPU updates weights.
            all.iter().filter(|param| param.is_linear()).for_each(|param| param.send_next_grad());
        }
        pass()?;
        device.finish()?;
        let started = Instant::now();
        let passed = || started.elapsed().as_secs_f64();
        if offload {
            squares(&all, true);
        }
        let of_squares = passed();
        updated = 0;
        for (param, moments) in llm.iter().zip(&mut moments) {
            updated += if param.adamw(moments, &step)? { param.len() } else { 0 };
        }
        let of_updates = passed();
        device.finish()?;
        turns.push([passed(), of_squares, of_updates]);
    }
    let [[first, ..], [secs, of_squares, of_updates]] = turns[..] else { return Ok(()) };
    // The GPU copies the weight, reads it, its rest, two moments and the gradient, and writes all but the gradient.
    let bytes = if offload { 0 } else { 32 * updated };
    told(
        what,
        json!({ "weights": updated, "secs": secs, "bytes": bytes, "first_secs": first, "until_squares": of_squares, "until_updated": of_updates }),
    );
    Ok(())
}
