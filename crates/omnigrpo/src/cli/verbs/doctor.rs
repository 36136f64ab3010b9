//! `doctor`: a report on the features of this machine, and a check of a checkpoint.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Result;
use omnigrpo_guard::told;
use omnigrpo_kernels::quant::QuantBits;
use omnigrpo_models::{
    Checkpoint, FAMILIES, LoadOptions, Model, Prompt, Quantization, SftExample, WeightFiles,
};
use omnigrpo_ops::Device;
use omnigrpo_text::{StopSet, Tokenizer};
use omnigrpo_train::{
    AdamWConfig, Algorithm, Divided, MemoryOf, MemoryPlan, ReferenceKept, STREAM_ROWS, Selection, Work, room,
};

use super::{print, rates};
use crate::settings::Settings;
use crate::settings::problem::Problem;
use omnigrpo_session::{Session, setup};

/// Time for the check of a GPU.
const CHECKUP: Duration = Duration::from_secs(10);

/// Prints one line per check. Fails if the checkpoint cannot be used.
// The order of the lines is the order of the checks.
pub fn doctor(settings: &Settings, session: &Session) -> Result<()> {
    let mut out = format!("omnigrpo {}\n", omnigrpo_observe::version());
    let mut line = |name: &str, value: String| out.push_str(&format!("{name:<18} {value}\n"));
    line("threads", rayon::current_num_threads().to_string());
    line("instructions", instructions());
    for feature in omnigrpo_kernels::probe::features() {
        let used = if feature.works { "works" } else { "not used" };
        line(&format!("  {}", feature.name), format!("{used}: {}", feature.why));
    }
    for (name, value) in rates::lines(setup::arithmetic(settings)) {
        line(&name, value);
    }
    line("memory", system_memory().unwrap_or_else(|| "unknown".into()));
    line("ffmpeg", program("ffmpeg", "needed for video files; GIF, WebP and frame folders work without it"));
    for (name, value) in gpu(settings) {
        line(&name, value);
    }
    let mut problems = Vec::new();
    if settings.log.gpu {
        for (name, found) in checkups(settings)? {
            let value = found.unwrap_or_else(|problem| {
                problems.push(format!("{}: {problem}", name.trim()));
                "PROBLEM, see below".into()
            });
            line(&name, value);
        }
    }
    let families: Vec<_> = FAMILIES.iter().map(|f| f.name).collect();
    line("families", families.join(", "));
    let unusable = problems.len();
    if settings.model.name.is_some() {
        let dir = setup::checkpoint_dir(settings)?;
        line("checkpoint", dir.display().to_string());
        let mut check = |name: &str, result: Result<String>| match result {
            Ok(text) => line(name, text),
            Err(error) => {
                problems.push(format!("{name}: {}", told(error.as_ref())));
                line(name, "PROBLEM, see below".into());
            }
        };
        check("tokenizer", tokenizer(&dir, session.checkpoint().ok()));
        match session.checkpoint() {
            Ok(opened) => {
                check("family", Ok(family(opened)));
                check("weights", weights(opened, settings));
                check("memory it takes", needed(opened, settings));
                check("chat template", template(opened));
            }
            // The error is about a flag without effect on this checkpoint.
            Err(error) if error.is::<Problem>() => return Err(error),
            // The other checks are skipped: each would fail because the family is unknown.
            Err(error) => check("family", Err(error)),
        }
    }
    print(&out)?;
    if problems.is_empty() {
        return Ok(());
    }
    let what = if unusable > 0 { "the GPU cannot be trusted" } else { "the checkpoint cannot be used" };
    Err(Problem::failure(what).got(problems.join("\n")).into())
}

/// Opens every GPU and checks it. Returns lines and problems by name.
fn checkups(settings: &Settings) -> Result<Vec<(String, Result<String, String>)>> {
    let count = omnigrpo_gpu::survey().map_or(1, |survey| survey.cards.len().max(1));
    let mut lines = Vec::new();
    for ordinal in 0..count {
        let cache = settings.env.cache_dir.join("kernels");
        let gpu = omnigrpo_gpu::Gpu::cuda(ordinal, &settings.env.cuda_folders, &cache).map_err(|error| {
            Problem::failure(format!("cuda:{ordinal} cannot be used")).got(error.to_string())
        })?;
        lines.push((format!("check of cuda:{ordinal}"), Ok(gpu.name())));
        lines.extend(
            gpu.checkup(CHECKUP).into_iter().map(|finding| (format!("  {}", finding.name), finding.result)),
        );
    }
    Ok(lines)
}

/// Returns lines about the driver, its cards, the kernel libraries, and the choice of `--device auto`.
fn gpu(settings: &Settings) -> Vec<(String, String)> {
    let mut lines = Vec::new();
    let survey = omnigrpo_gpu::survey();
    match &survey {
        Err(omnigrpo_gpu::Error::NoDriver) if !setup::has_nvidia_gpu() => {
            return vec![
                ("GPU driver".to_owned(), "not needed: no NVIDIA card is found".to_owned()),
                ("device".to_owned(), "cpu, which `--device auto` takes".to_owned()),
            ];
        }
        Err(error) => lines.push(("GPU driver".to_owned(), error.to_string())),
        Ok(survey) => {
            let (major, minor) = (survey.supports / 1000, survey.supports % 1000 / 10);
            lines.push(("GPU driver".to_owned(), format!("NVIDIA, supports CUDA {major}.{minor}")));
            for (ordinal, card) in survey.cards.iter().enumerate() {
                let [major, minor] = card.capability;
                let size = room::size(card.memory as u64);
                let usable =
                    survey.usable(ordinal).map_or_else(|error| error.to_string(), |_| "can be used".into());
                let text = format!("{}, {size}, compute capability {major}.{minor}: {usable}", card.name);
                lines.push((format!("  cuda:{ordinal}"), text));
            }
            if survey.cards.is_empty() {
                lines.push(("  GPUs".to_owned(), setup::no_cards(settings)));
            }
        }
    }
    let supports = survey.as_ref().ok().map(|survey| survey.supports);
    let libraries = omnigrpo_gpu::libraries(&settings.env.cuda_folders, supports);
    let mut line = |library: &omnigrpo_gpu::Library, unless: &str| {
        let value = match &library.found {
            Ok((path, [major, minor])) => format!("{major}.{minor}, {}", path.display()),
            Err(error) => format!("{error}{unless}"),
        };
        lines.push((format!("  {}", library.name), value));
    };
    libraries.iter().for_each(|library| line(library, ""));
    if survey.as_ref().is_ok_and(|survey| survey.cards.len() > 1) {
        line(
            &omnigrpo_gpu::nccl(&settings.env.cuda_folders, supports),
            "; only ranks on several GPUs need it",
        );
    }
    let took = match survey {
        Err(omnigrpo_gpu::Error::NoDriver) => "cpu, which `--device auto` takes",
        Ok(survey) if survey.cards.is_empty() => "cpu, which `--device auto` takes",
        Ok(survey) if survey.usable(0).is_ok() && libraries.iter().all(|library| library.found.is_ok()) => {
            "cuda:0, which `--device auto` takes"
        }
        _ => "none: `--device auto` fails until the GPU can be used; `--device cpu` needs no GPU",
    };
    lines.push(("device".to_owned(), took.to_owned()));
    lines
}

fn family(checkpoint: &Checkpoint) -> String {
    let family = checkpoint.family();
    let c = family.architecture().decoder_config();
    format!(
        "{}: {} layers, width {}, {}/{} heads of {}, vocabulary {}",
        family.name(),
        c.layers,
        c.hidden,
        c.heads.q,
        c.heads.kv,
        c.heads.dim,
        c.vocab
    )
}

fn weights(checkpoint: &Checkpoint, settings: &Settings) -> Result<String> {
    let files = WeightFiles::open(checkpoint.dir(), |key| checkpoint.family().format().published_name(key))?;
    let bytes: usize = files.names().filter_map(|n| files.num_bytes(n)).sum();
    drop(files);
    let options = LoadOptions { dtype: settings.model.dtype, ..LoadOptions::default() };
    omnigrpo_train::weights_fit(
        &Model::load(checkpoint, &LoadOptions { outline: true, ..options })?,
        Device::Cpu,
    )?;
    let model = Model::load(checkpoint, &options)?;
    let params: usize = model.params().iter().map(|p| p.len()).sum();
    Ok(format!(
        "{} tensors, {:.1} million parameters, {:.1} MB, embeddings {}",
        model.params().len(),
        params as f64 / 1e6,
        bytes as f64 / 1e6,
        if model.decoder().tied() { "tied" } else { "untied" }
    ))
}

/// Returns the memory of each way of training, one per line, with the maximum number of tokens per pass and without the program
/// itself.
fn needed(checkpoint: &Checkpoint, settings: &Settings) -> Result<String> {
    let full = Selection { llm: true, projector: true, ..Selection::NONE };
    let ways = [
        ("without training", None, false, None),
        ("full", Some(&full), false, None),
        ("LoRA", Some(&Selection::NONE), true, None),
        ("LoRA, 8 bit", Some(&Selection::NONE), true, Some(QuantBits::Eight)),
        ("LoRA, 4 bit", Some(&Selection::NONE), true, Some(QuantBits::Four)),
    ];
    let (algorithm, optimizer) = (Divided::from(Algorithm::default()), AdamWConfig::default());
    let stream = SftExample {
        prompt: Prompt {
            ids: vec![0],
            spans: Vec::new(),
            positions: vec![[0; 3]],
            next_position: 1,
            media: Vec::new(),
            instruction: Vec::new(),
            text: String::new(),
        },
        target: vec![0; STREAM_ROWS],
        turns: Vec::new(),
    };
    let mut lines = Vec::new();
    for (name, selection, adapted, bits) in ways {
        let options = LoadOptions {
            dtype: settings.model.dtype,
            quantization: bits.map(|bits| Quantization { bits, keep: &|_, _| false }),
            device: Device::Outline,
            outline: true,
            ..LoadOptions::default()
        };
        let mut outline = Model::load(checkpoint, &options)?;
        if adapted {
            outline.add_lora(&settings.lora)?;
        }
        if let Some(selection) = selection {
            selection.apply(&outline)?;
        }
        let plan = MemoryPlan {
            algorithm: &algorithm,
            optimizer: &optimizer,
            work: if selection.is_some() { Work::Examples(vec![stream.clone()]) } else { Work::None },
            answer: None,
            prompts_per_step: 1,
            evaluation: None,
            reference: ReferenceKept::InPlace,
            own_reference: None,
            of: MemoryOf::Host,
        };
        let memory = omnigrpo_train::memory(&outline, &plan)?;
        lines.push(format!("{name}: {} ({})", room::size(memory.total()), memory));
    }
    Ok(lines.join("\n                   "))
}

fn tokenizer(dir: &Path, checkpoint: Option<&Checkpoint>) -> Result<String> {
    let tokenizer = Tokenizer::from_dir(dir)?;
    let stops = match checkpoint {
        Some(checkpoint) => checkpoint.family().stops(dir, &tokenizer, &[])?,
        None => StopSet::from_dir(dir, &tokenizer, &[])?,
    };
    let mut names: Vec<String> =
        stops.ids.iter().map(|&id| tokenizer.decode(&[id], false)).collect::<Result<_, _>>()?;
    names.extend(stops.strings);
    Ok(format!("{} ids, stops at {}", tokenizer.vocab_size(), names.join(" ")))
}

fn template(checkpoint: &Checkpoint) -> Result<String> {
    Ok(checkpoint.family().processor().chat_template(checkpoint.dir())?.origin().to_string())
}

fn program(name: &str, why: &str) -> String {
    match Command::new(name).arg("-version").output() {
        Ok(output) => String::from_utf8_lossy(&output.stdout).lines().next().unwrap_or("found").to_owned(),
        Err(_) => format!("not found: {why}"),
    }
}

#[cfg(target_arch = "x86_64")]
fn instructions() -> String {
    let mut found = vec!["SSE2"];
    if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        found.push("AVX2");
    }
    if is_x86_feature_detected!("avx512f") {
        found.push("AVX-512");
    }
    found.extend(omnigrpo_kernels::probe::features().into_iter().filter(|f| f.works).map(|f| f.name));
    found.join(", ")
}

#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> String {
    "portable".into()
}

fn system_memory() -> Option<String> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |key: &str| -> Option<f64> {
        text.lines().find(|l| l.starts_with(key))?.split_whitespace().nth(1)?.parse().ok()
    };
    Some(format!("{:.1} GB free of {:.1} GB", kib("MemAvailable:")? / 1e6, kib("MemTotal:")? / 1e6))
}
