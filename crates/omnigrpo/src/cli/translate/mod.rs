//! `translate`: turns the launch script or settings file of another trainer into a file for `train --config`.
//!
//! A script of a shell is read by [`shell`], a training script by [`python`]; neither is run. Its settings pass through the tables of
//! [`crate::settings::foreign`], as on the command line. The result names for each setting what it comes from, and what is different
//! here. Settings without a counterpart follow in comments with the reason.

mod python;
mod shell;

use std::cell::LazyCell;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use serde_json::Value as Json;

use super::draft::{Draft, one_line};
use crate::settings::layer::{Entry, Layer, is_secret};
use crate::settings::values::Raw;
use crate::settings::{Environment, Given, Origin, Problem, Value, Verb, find, foreign};
use python::{Argument, Call, Script};

/// A trainer whose scripts are read.
#[derive(Debug)]
struct System {
    name: &'static str,
    /// Preset with its defaults; empty if there is none.
    preset: &'static str,
    /// Defaults that differ from the preset or from this program.
    defaults: &'static [(&'static str, &'static str)],
    /// Environment variables that it reads as settings, with the name of the setting.
    variables: &'static [(&'static str, &'static str)],
    /// True if `per_device_train_batch_size` counts for each of its processes.
    per_process: bool,
}

/// Maximum number of settings of a script.
const MAX_SETTINGS: usize = 4096;
/// Variables of a script that set the number of its processes or settings of a [`System`].
const VARIABLES: [&str; 5] = ["NPROC_PER_NODE", "NNODES", "MAX_PIXELS", "FPS_MAX_FRAMES", "NFRAMES"];

const TRL: System = System { name: "TRL", preset: "trl", defaults: &[], variables: &[], per_process: true };
const UNSLOTH: System = System { name: "Unsloth", ..TRL };
const VLM_R1: System = System { name: "VLM-R1", preset: "vlm-r1", ..TRL };
const VIVQA_X: System = System { name: "VLM-R1 for ViVQA-X", preset: "vivqa-x", ..TRL };
const R1_V: System = System { name: "R1-V", preset: "r1-v", ..TRL };
const R1_OMNI: System = System { name: "R1-Omni", preset: "humanomni", ..TRL };
const QWEN_VIDEO: System = System { name: "qwen-vl-finetune", preset: "qwen-mcq", ..TRL };
const MS_SWIFT: System = System {
    name: "ms-swift",
    preset: "trl",
    defaults: &[
        ("loss_type", "grpo"),
        ("beta", "0.04"),
        ("temperature", "0.9"),
        ("use_peft", "true"),
        ("lora_r", "8"),
        ("lora_alpha", "32"),
        ("tune_mm_vision", "false"),
    ],
    variables: &[
        ("MAX_PIXELS", "max_pixels"),
        ("FPS_MAX_FRAMES", "video_max_frames"),
        ("NFRAMES", "nframes"),
    ],
    per_process: true,
};
const VERL: System = System {
    name: "verl",
    preset: "",
    defaults: &[
        ("learning_rate", "1.0e-6"),
        ("lr_scheduler_type", "constant_with_warmup"),
        ("weight_decay", "0.01"),
        ("loss_agg", "token_mean"),
        ("beta", "0.0"),
        ("max_completion_length", "512"),
        ("tune_mm_vision", "true"),
    ],
    variables: &[],
    per_process: false,
};
const EASY_R1: System = System {
    name: "EasyR1",
    preset: "",
    // Defaults of its `examples/config.yaml` and its classes.
    defaults: &[
        ("learning_rate", "1.0e-6"),
        ("lr_scheduler_type", "constant_with_warmup"),
        ("weight_decay", "0.01"),
        ("loss_agg", "token_mean"),
        ("beta", "0.01"),
        ("epsilon", "0.2"),
        ("epsilon_high", "0.3"),
        ("delta", "3.0"),
        ("num_generations", "5"),
        ("temperature", "1.0"),
        ("top_p", "0.99"),
        ("max_prompt_length", "2048"),
        ("max_completion_length", "2048"),
        ("gradient_accumulation_steps", "128"),
        ("steps_per_generation", "4"),
        ("num_train_epochs", "15"),
        ("min_pixels", "262144"),
        ("max_pixels", "4194304"),
        ("gradient_checkpointing", "true"),
        ("tune_mm_vision", "true"),
    ],
    variables: &[],
    per_process: false,
};

/// Settings whose meaning differs from that in the other trainers.
const DIFFERENCES: &[(&str, &str)] = &[
    ("max_prompt_length", "a longer prompt is skipped, never cut"),
    ("seed", "the same seed draws other numbers than there"),
    ("deepspeed", "only what applies to one process"),
    ("resume_from_checkpoint", "an unfinished run in `output_dir` is resumed by default"),
    ("push_to_hub", "needs HF_TOKEN in the environment"),
    ("lora_target_modules", "names of weights here; `all-linear` are those of the language model"),
    ("importance_sampling_correction", "rollouts come from the same weights, so it has little to correct"),
    ("reward_funcs", "`omnigrpo rewards list` describes each; a function of yours is FILE.py:FUNCTION"),
];

/// A file of another trainer, as settings.
struct Source {
    system: &'static System,
    entries: Vec<Entry>,
    /// Number of processes that the script starts.
    processes: u64,
    notes: Vec<String>,
}

/// The translation of a file.
#[derive(Debug)]
pub struct Translation {
    /// Text of a file for `--config`.
    pub text: String,
    /// Settings that the user must decide on, each with advice.
    pub open: Vec<String>,
}

/// Translates a file. `read` returns the text of a file that the script names, if there is one.
///
/// # Errors
/// Returns an error if the file is not a launch script, a training script or a file of settings that configures one GRPO run.
pub fn translate(
    text: &str,
    path: &Path,
    home: &str,
    read: impl Fn(&Path) -> Option<String>,
) -> Result<Translation, Problem> {
    let name = path.display().to_string();
    let source = match path.extension().and_then(|extension| extension.to_str()) {
        Some("yaml" | "yml") => of_yaml(text, &name),
        Some("py") => of_python(text, path),
        _ => of_shell(text, &name, home, &read),
    };
    let mut source = source.map_err(|problem| problem.at(name.clone()))?;
    hide_passwords(&mut source);
    if source.entries.len() > MAX_SETTINGS {
        return Err(Problem::usage("the file has too many settings")
            .at(name)
            .got(source.entries.len().to_string())
            .expected(format!("at most {MAX_SETTINGS}")));
    }
    Ok(write(source, &name))
}

// The parts of a launch are read in the order in which they override one another.
fn of_shell(
    text: &str,
    name: &str,
    home: &str,
    read: &impl Fn(&Path) -> Option<String>,
) -> Result<Source, Problem> {
    let lines = shell::commands(text, home, &VARIABLES).map_err(|error| {
        Problem::usage("the file is no shell script").got(error).expected(
            "a launch script for a shell, a training script (`.py`) or a file of settings (`.yaml`)",
        )
    })?;
    let mut launches: Vec<_> = lines.iter().filter_map(|line| Some((line, launched(&line.words)?))).collect();
    let Some((line, (system, at))) = launches.pop() else {
        return Err(Problem::usage("the file starts no GRPO training that this program knows").expected(
            "a command of TRL, VLM-R1, R1-V, R1-Omni, qwen-vl-finetune, ms-swift, Unsloth, EasyR1 or verl, such as \
             `torchrun … grpo.py …`, `swift rlhf …` or `python -m verl.trainer.main_ppo …`",
        ));
    };
    if !launches.is_empty() {
        return Err(Problem::usage("the file starts several trainings")
            .got(format!("{} commands", launches.len() + 1))
            .expected("one per file")
            .help("copy each command into a file of its own"));
    }
    let (launcher, words) = line.words.split_at(at);
    let mut entries = entries_of(words);
    let mut notes = Vec::new();
    for (variable, name) in system.variables {
        if let Some(value) = line.environment.get(*variable) {
            entries.push(entry(name, vec![value.clone()], Origin::Environment(variable)));
        }
    }
    if let Some(at) =
        entries.iter().position(|entry| matches!(entry.name.as_str(), "config" | "easyr1.config"))
    {
        let entry = entries.remove(at);
        let file = entry.text();
        match read(Path::new(&file)) {
            Some(text) => {
                let base = of_yaml(&text, &file)?;
                let given = |entry: &Entry| entries.iter().any(|own| own.name == entry.name);
                let weaker: Vec<Entry> = base.entries.into_iter().filter(|entry| !given(entry)).collect();
                entries.extend(weaker);
                notes.push(format!("Settings of {file}, which the script names, are included."));
            }
            None => notes.push(format!(
                "{file}, which the script names, was not found; the defaults of {} stand for it.",
                system.name
            )),
        }
    }
    let processes = if system.per_process { processes(launcher, &line.environment) } else { Ok(1) };
    let processes = processes.unwrap_or_else(|unknown| {
        notes.push(format!(
            "The number of processes is unknown ({unknown}), so batches are those of one process."
        ));
        1
    });
    notes.insert(0, format!("Translated from {name}, a launch script of {}.", system.name));
    Ok(Source { system, entries, processes, notes })
}

/// Returns the trainer that a command starts, and the index of its first argument.
fn launched(words: &[String]) -> Option<(&'static System, usize)> {
    let pair = |at: usize, first: &str, second: &str| {
        words[at].ends_with(first) && words.get(at + 1).is_some_and(|word| word == second)
    };
    let all = LazyCell::new(|| words.join(" ").to_ascii_lowercase());
    let is_grpo = LazyCell::new(|| all.contains("grpo"));
    for (at, word) in words.iter().enumerate() {
        match word.as_str() {
            _ if pair(at, "swift", "rlhf") => return Some((&MS_SWIFT, at + 2)),
            _ if pair(at, "trl", "grpo") => return Some((&TRL, at + 2)),
            "verl.trainer.main" => return Some((&EASY_R1, at + 1)),
            module if module.contains("main_ppo") || module.contains("main_dapo") => {
                return Some((&VERL, at + 1));
            }
            script if script.ends_with("swift/cli/rlhf.py") => return Some((&MS_SWIFT, at + 1)),
            script if script.ends_with(".py") && *is_grpo => {
                let script = script.to_ascii_lowercase();
                let system = match () {
                    () if all.contains("humanomni") => &R1_OMNI,
                    () if all.contains("vivqa") => &VIVQA_X,
                    () if script.contains("grpo_jsonl") || script.contains("grpo_rec") => &VLM_R1,
                    () if all.contains("--data_file_paths") => &VLM_R1,
                    () if script.contains("train_grpo") || all.contains("--dataset_use") => &QWEN_VIDEO,
                    () if script.contains("open_r1/") => &R1_V,
                    () => &TRL,
                };
                return Some((system, at + 1));
            }
            _ => {}
        }
    }
    None
}

/// Returns the number of processes that a launcher starts, or the text that does not say it.
fn processes(launcher: &[String], environment: &HashMap<String, String>) -> Result<u64, String> {
    let option = |names: &[&str]| {
        launcher.iter().enumerate().find_map(|(at, word)| {
            let word = word.trim_start_matches('-').replace('-', "_");
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (word, launcher.get(at + 1).cloned()),
            };
            names.contains(&name.as_str()).then_some(value).flatten()
        })
    };
    let number = |text: &str| text.parse::<u64>().ok().filter(|&n| n > 0).ok_or_else(|| text.to_owned());
    if let Some(all) = option(&["num_processes"]) {
        return number(&all);
    }
    let each = option(&["nproc_per_node", "num_gpus"]);
    let each = each.or_else(|| environment.get("NPROC_PER_NODE").cloned()).unwrap_or_else(|| "1".to_owned());
    let nodes = option(&["nnodes", "num_nodes"]).or_else(|| environment.get("NNODES").cloned());
    let nodes = nodes.unwrap_or_else(|| "1".to_owned());
    number(&each)?.checked_mul(number(&nodes)?).ok_or_else(|| format!("{each} x {nodes}"))
}

/// Splits the arguments of a command into settings.
fn entries_of(words: &[String]) -> Vec<Entry> {
    let mut entries: Vec<Entry> = Vec::new();
    let mut open = false;
    for word in words {
        // Hydra's marks for a setting that is added or replaced.
        if let Some((name, value)) = foreign::dotted(word.trim_start_matches('+')) {
            open = false;
            entries.push(entry(name, vec![value.to_owned()], Origin::Flag));
        } else if let Some(name) = word.strip_prefix("--").filter(|name| !name.is_empty()) {
            let (name, value) =
                name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
            open = true;
            entries.push(entry(name, value.map(str::to_owned).into_iter().collect(), Origin::Flag));
        } else if let (true, Some(Entry { raw: Some(Raw::Arguments(words)), .. })) =
            (open, entries.last_mut())
        {
            words.push(word.clone());
        }
    }
    for entry in &mut entries {
        // A bare flag is a switch.
        if let Some(Raw::Arguments(words)) = &mut entry.raw
            && words.is_empty()
        {
            words.push("true".to_owned());
        }
    }
    entries
}

fn entry(name: &str, words: Vec<String>, origin: Origin) -> Entry {
    Entry { name: name.to_owned(), raw: Some(Raw::Arguments(words)), origin }
}

/// Replaces passwords and keys in addresses, and adds a note about each.
fn hide_passwords(source: &mut Source) {
    for entry in &mut source.entries {
        let Some(Raw::Arguments(words) | Raw::Items(words)) = &mut entry.raw else { continue };
        for word in words.iter_mut().filter(|word| word.contains("://")) {
            let hidden = omnigrpo_rewards::redacted(word);
            if hidden != *word {
                source
                    .notes
                    .push(format!("The address of `{}` has a secret, which is left out here.", entry.name));
                *word = hidden;
            }
        }
    }
}

fn of_yaml(text: &str, name: &str) -> Result<Source, Problem> {
    let json: Json = serde_saphyr::from_str(text).map_err(|error| {
        Problem::usage("the file is no YAML file of settings").got(error.without_snippet().to_string())
    })?;
    let Json::Object(all) = &json else {
        return Err(Problem::usage("the file has no settings").expected("lines of `setting: value`"));
    };
    let system = match () {
        () if all.contains_key("actor_rollout_ref") => &VERL,
        () if all.contains_key("worker") => &EASY_R1,
        () if all.contains_key("rlhf_type") => &MS_SWIFT,
        () => &TRL,
    };
    let mut entries = Vec::new();
    flatten("", &json, name, &mut entries);
    let notes = vec![format!("Translated from {name}, a file of settings of {}.", system.name)];
    Ok(Source { system, entries, processes: 1, notes })
}

/// Turns nested settings into settings with dotted names. A mapping under a name without dots is the value of one setting.
fn flatten(path: &str, json: &Json, file: &str, entries: &mut Vec<Entry>) {
    let plain = |json: &Json| match json {
        Json::String(text) => text.clone(),
        other => other.to_string(),
    };
    let origin = Origin::Config(file.to_owned());
    match json {
        Json::Object(map)
            if path.is_empty() || foreign::dotted(&format!("{path}.x=1")).is_some() && !map.is_empty() =>
        {
            for (name, value) in map {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                flatten(&path, value, file, entries);
            }
        }
        Json::Object(map) => {
            entries.push(Entry { name: path.to_owned(), raw: Some(Raw::Object(map.clone())), origin });
        }
        // Hydra writes a list as one word.
        Json::Array(items) if path.contains('.') => {
            let items: Vec<String> = items.iter().map(plain).collect();
            entries.push(entry(path, vec![format!("[{}]", items.join(","))], origin));
        }
        Json::Array(items) => {
            let raw = Some(Raw::Items(items.iter().map(plain).collect()));
            entries.push(Entry { name: path.to_owned(), raw, origin });
        }
        // A setting without a value has its default.
        Json::Null => {}
        scalar => entries.push(entry(path, vec![plain(scalar)], origin)),
    }
}

fn of_python(text: &str, path: &Path) -> Result<Source, Problem> {
    let script =
        python::read(text).map_err(|error| Problem::usage("the file is no Python script").got(error))?;
    if !script.calls.iter().any(|call| matches!(call.name, "GRPOConfig" | "GRPOTrainer")) {
        return Err(Problem::usage("the script configures no GRPO training")
            .expected("a call of `GRPOConfig` or `GRPOTrainer` of TRL or Unsloth"));
    }
    let is_unsloth = script.imports.iter().any(|module| module.starts_with("unsloth"));
    let system = if is_unsloth { &UNSLOTH } else { &TRL };
    let mut notes =
        vec![format!("Translated from {}, a training script for {}.", path.display(), system.name)];
    let (mut entries, mut seen): (Vec<Entry>, HashSet<String>) = (Vec::new(), HashSet::new());
    for call in &script.calls {
        let mut own = match call.name {
            "GRPOConfig" | "LoraConfig" | "get_peft_model" => of_config(call, &mut notes),
            "GRPOTrainer" => of_trainer(call, &script, path, &mut notes),
            "from_pretrained" => of_model(call),
            "load_dataset" => of_dataset(call),
            _ => Vec::new(),
        };
        // The first call counts: a processor is loaded after the model, under the same name.
        own.retain(|entry| seen.insert(entry.name.clone()));
        entries.extend(own);
    }
    let adapters = script.calls.iter().any(|call| matches!(call.name, "LoraConfig" | "get_peft_model"));
    if adapters && !seen.contains("use_peft") {
        entries.push(entry("use_peft", vec!["true".to_owned()], Origin::Config("adapters".to_owned())));
    }
    Ok(Source { system, entries, processes: 1, notes })
}

/// Returns an argument of a call as a setting.
fn of_argument(call: &Call, name: &str, words: &[String]) -> Entry {
    entry(name, words.to_vec(), Origin::Config(format!("line {}", call.line)))
}

/// Returns the named argument of a call, if it is a plain value, as the setting `to`.
fn named(call: &Call, from: &str, to: &str) -> Option<Entry> {
    match call.named.iter().find(|(name, _)| *name == from) {
        Some((_, Argument::Words(words))) => Some(of_argument(call, to, words)),
        _ => None,
    }
}

/// Returns the first positional argument of a call, if it is a plain value, as a setting.
fn first(call: &Call, name: &str) -> Option<Entry> {
    match call.positional.first() {
        Some(Argument::Words(words)) => Some(of_argument(call, name, words)),
        _ => None,
    }
}

/// Returns a note on an argument that is not a plain value.
fn unread(call: &Call, name: &str, source: &str) -> String {
    const MOST: usize = 200;
    let source: String = if is_secret(name) { "…".to_owned() } else { source.chars().take(MOST).collect() };
    format!(
        "`{name}` in line {} is `{}`, which is not a plain value: set it here if it matters.",
        call.line,
        omnigrpo_rewards::redacted(&source.split_whitespace().collect::<Vec<_>>().join(" "))
    )
}

/// Reads the arguments of a configuration, whose names are those of settings.
fn of_config(call: &Call, notes: &mut Vec<String>) -> Vec<Entry> {
    let mut own = Vec::new();
    for (name, argument) in &call.named {
        match argument {
            Argument::Words(words) => own.push(of_argument(call, name, words)),
            Argument::Source(source) => notes.push(unread(call, name, source)),
        }
    }
    own
}

/// Reads the model and the rewards of a trainer.
fn of_trainer(call: &Call, script: &Script, path: &Path, notes: &mut Vec<String>) -> Vec<Entry> {
    let mut own: Vec<Entry> = Vec::new();
    for (name, argument) in &call.named {
        match (*name, argument) {
            ("model", Argument::Words(words)) => own.push(of_argument(call, "model_name_or_path", words)),
            ("reward_funcs", Argument::Words(words)) => {
                let is_function = |word: &String| script.functions.contains(word.as_str());
                if words.iter().any(is_function) {
                    notes.push(
                        "Rewards are functions of the script. To use them, this program imports the script: move \
                         them into a file of their own, so that the import starts no training."
                            .to_owned(),
                    );
                }
                let words: Vec<String> = words
                    .iter()
                    .map(|word| match is_function(word) {
                        true => format!("{}:{word}", path.display()),
                        false => word.clone(),
                    })
                    .collect();
                own.push(of_argument(call, name, &words));
            }
            ("reward_funcs", Argument::Source(source)) => notes.push(unread(call, name, source)),
            _ => {}
        }
    }
    own
}

/// Reads the arguments with which a model is loaded.
fn of_model(call: &Call) -> Vec<Entry> {
    // Unsloth gives the name of the model by name.
    let model = named(call, "model_name", "model_name_or_path").or_else(|| first(call, "model_name_or_path"));
    let others = call.named.iter().filter(|(name, _)| *name != "model_name" && foreign::knows(name));
    let own_names = call.named.iter().filter(|(name, _)| find(name).is_some());
    let plain = others.chain(own_names).filter_map(|(name, argument)| match argument {
        Argument::Words(words) => Some(of_argument(call, name, words)),
        Argument::Source(_) => None,
    });
    model.into_iter().chain(plain).collect()
}

/// Reads the name and the split of a dataset.
fn of_dataset(call: &Call) -> Vec<Entry> {
    first(call, "dataset_name").into_iter().chain(named(call, "split", "dataset_train_split")).collect()
}

fn write(source: Source, file: &str) -> Translation {
    let Source { system, entries, processes, notes } = source;
    let written: Vec<(String, String)> =
        entries.iter().map(|entry| (entry.name.replace('-', "_"), entry.text())).collect();
    let Layer { given, dropped, problems, became } = Layer::read(entries, Some(Verb::Train));
    let mut draft = Draft::default();
    for Given { flag, value, .. } in given.into_iter().filter(|given| !given.flag.command_line_only) {
        let source =
            became.iter().filter(|(name, _)| *name == flag.name).map(|(_, text)| format!("from {text}"));
        let difference =
            DIFFERENCES.iter().find(|(name, _)| *name == flag.name).map(|(_, text)| (*text).to_owned());
        let own = |name: &str| name == flag.name || flag.aliases.contains(&name);
        let is_open = written.iter().any(|(name, text)| own(name) && text.contains('$'));
        let fill = is_open.then(|| "fill in what begins with `$`".to_owned());
        draft.put(flag.name, value, source.chain(difference).chain(fill).collect());
    }
    if !system.preset.is_empty() && !draft.has("preset") {
        draft.set("preset", system.preset, format!("defaults of {}", system.name));
    }
    for (name, text) in system.defaults {
        if !draft.has(name) {
            draft.set(name, text, format!("default of {}", system.name));
        }
    }
    if processes > 1 {
        multiply_batch(&mut draft, system, processes);
    }
    let mut open: Vec<String> = problems.iter().map(Problem::in_one_line).collect();
    open.extend(draft.settle());

    let mut text =
        one_line(&format!("# omnigrpo train --config {}", Path::new(file).with_extension("yaml").display()));
    text.push('\n');
    notes.iter().for_each(|note| text.push_str(&format!("# {}\n", one_line(note))));
    text.push_str(&draft.text());
    const NEEDED: [(&str, &[&str]); 3] = [
        ("model_name_or_path", &[]),
        ("train_file", &["dataset_use", "data_file_paths"]),
        ("output_dir", &["exp_name"]),
    ];
    let lacks =
        |(name, others): &(&str, &[&str])| !draft.has(name) && !others.iter().any(|other| draft.has(other));
    let missing: Vec<String> =
        NEEDED.iter().filter(|needed| lacks(needed)).map(|(name, _)| (*name).to_owned()).collect();
    let mut list = |title: &str, items: &[String]| {
        if !items.is_empty() {
            text.push_str(&format!("\n# {title}\n"));
            items.iter().for_each(|item| text.push_str(&format!("#   {}\n", one_line(item))));
        }
    };
    list("Required, and not in the file:", &missing);
    list("Unsupported or wrong here, and left out:", &open);
    let dropped: Vec<String> = dropped.iter().map(|(written, why)| format!("{written}: {why}")).collect();
    list("Without a counterpart and without effect here:", &dropped);
    Translation { text, open }
}

/// Gives one process the batch of several.
fn multiply_batch(draft: &mut Draft, system: &System, processes: u64) {
    const NAME: &str = "per_device_train_batch_size";
    let default = || {
        let mut own = Draft::default();
        own.set("preset", system.preset, "");
        let resolved = own.resolve(Environment::default()).ok()?;
        Some((resolved.values.lookup(NAME)?.0.clone(), Vec::new()))
    };
    let Some((Value::Int(each), mut comments)) = draft.take(NAME).or_else(default) else { return };
    let all = i64::try_from(processes).ok().and_then(|processes| each.checked_mul(processes));
    comments.push(format!("{processes} processes × {each}: one process does the work of all"));
    draft.put(NAME, Value::Int(all.unwrap_or(each)), comments);
}
