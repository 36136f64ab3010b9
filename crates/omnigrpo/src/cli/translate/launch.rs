//! Launchers: how many processes a script starts, and what each of them holds a part of.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value as Json;

/// The processes of a script.
#[derive(Debug, Default)]
pub struct Launch {
    /// Processes of a machine, with the text that gives them.
    pub processes: Option<(u64, String)>,
    /// Machines.
    pub machines: u64,
    /// Value of `shard`, with the text that gives it.
    pub shard: Option<(&'static str, String)>,
    /// True if the state of the optimizer is in main memory.
    pub offloads: bool,
    /// Lines about numbers that the script does not have.
    pub open: Vec<String>,
}

/// Values of `shard` by the stage of ZeRO.
const STAGES: [&str; 4] = ["none", "optimizer", "gradients", "weights"];

/// Number of a setting: a positive integer.
fn number(text: &str) -> Option<u64> {
    text.parse().ok().filter(|&n| (1..=4096).contains(&n))
}

/// A launcher: its words before the script, and its environment.
struct Launcher<'a> {
    words: &'a [String],
    environment: &'a HashMap<String, String>,
}

impl Launcher<'_> {
    /// Returns the first of these options, with its value.
    fn option(&self, names: &[&str]) -> Option<(String, String)> {
        self.words.iter().enumerate().find_map(|(at, word)| {
            let (name, value) = match word.strip_prefix('-')?.trim_start_matches('-').split_once('=') {
                Some((name, value)) => (name.replace('-', "_"), Some(value.to_owned())),
                None => (word.trim_start_matches('-').replace('-', "_"), self.words.get(at + 1).cloned()),
            };
            names.contains(&name.as_str()).then(|| Some((format!("--{name}"), value?))).flatten()
        })
    }

    fn variable(&self, name: &str) -> Option<(String, String)> {
        // `env NAME=VALUE command`.
        let own = self.words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        let value = own.map(str::to_owned).or_else(|| self.environment.get(name).cloned());
        value.map(|value| (name.to_owned(), value))
    }

    fn starts(&self, program: &str) -> bool {
        self.words.iter().any(|word| word.rsplit('/').next() == Some(program))
    }

    /// Returns the number of processes of one of the `machines`, with the text that gives it. `all` is that of all machines in a
    /// file of the launcher.
    fn processes(&self, all: Option<(String, String)>, machines: u64) -> Option<(String, String)> {
        let of_all = self.option(&["num_processes"]);
        let own = self.option(&["nproc_per_node", "nproc", "num_gpus"]).filter(|_| of_all.is_none());
        let each = of_all.or(all).map(|(name, value)| {
            let each = number(&value).map(|all| (all / machines).max(1));
            (name, each.map_or(value, |each| each.to_string()))
        });
        // DeepSpeed starts one process for each visible GPU.
        let visible = || {
            let (name, list) = self.option(&["include"]).or_else(|| self.variable("CUDA_VISIBLE_DEVICES"))?;
            let list = list.split_once(':').map_or(list.as_str(), |(_, list)| list).trim_matches(['\'', '"']);
            Some((name, list.split(',').filter(|id| !id.is_empty()).count().to_string()))
        };
        own.or(each)
            .or_else(|| self.variable("NPROC_PER_NODE"))
            .or_else(|| visible().filter(|_| self.starts("deepspeed")))
    }
}

/// Reads a launcher: its words before the script, and its environment. `read` returns the text of a file.
pub fn of(
    words: &[String],
    environment: &HashMap<String, String>,
    read: &impl Fn(&Path) -> Option<String>,
) -> Launch {
    let mut launch = Launch { machines: 1, ..Launch::default() };
    let launcher = Launcher { words, environment };
    let uses_accelerate = launcher.starts("accelerate");
    let mut all = None;
    if let Some((_, file)) = launcher.option(&["config_file"]).filter(|_| uses_accelerate) {
        match read(Path::new(&file)).and_then(|text| serde_saphyr::from_str::<Json>(&text).ok()) {
            Some(json) => all = launch.accelerate(&json, &file),
            None => {
                // Files of projects are named after what they set.
                launch.stage_by_name(&file);
                launch.lacks_config(&file);
            }
        }
    }
    if let Some((_, stage)) = launcher.option(&["zero_stage"])
        && let Some(&shard) = stage.parse().ok().and_then(|stage: usize| STAGES.get(stage))
    {
        launch.shard = Some((shard, format!("`--zero_stage {stage}`")));
    }
    if let Some((_, strategy)) = launcher.option(&["fsdp_sharding_strategy"]) {
        launch.shard = fsdp(&strategy).map(|shard| (shard, format!("`--fsdp_sharding_strategy {strategy}`")));
    }
    let machines = launcher.option(&["nnodes", "num_nodes", "num_machines"]);
    if let Some((name, value)) = machines.or_else(|| launcher.variable("NNODES")) {
        // `--nnodes=MIN:MAX` of torchrun.
        match number(value.split(':').next().unwrap_or_default()) {
            Some(machines) => launch.machines = machines,
            None => launch.open.push(format!("The number of machines is unknown (`{name}` {value}).")),
        }
    }
    match launcher.processes(all, launch.machines) {
        Some((name, value)) => match number(&value) {
            Some(processes) => launch.processes = Some((processes, format!("`{name}`"))),
            None => launch.open.push(format!(
                "The number of processes is unknown (`{name}` {value}); write it as `nproc_per_node`."
            )),
        },
        None if (uses_accelerate || launcher.starts("deepspeed")) && launch.open.is_empty() => launch.open.push(
            "The number of processes depends on the machine that the script is for; write it as `nproc_per_node`."
                .to_owned(),
        ),
        None => {}
    }
    launch
}

/// Returns the value of `shard` for a strategy of FSDP.
fn fsdp(strategy: &str) -> Option<&'static str> {
    match strategy.to_ascii_uppercase().as_str() {
        "FULL_SHARD" | "1" | "TRUE" | "HYBRID_SHARD" | "4" => Some("weights"),
        "SHARD_GRAD_OP" | "2" | "FALSE" | "HYBRID_SHARD_ZERO2" | "5" => Some("gradients"),
        _ => None,
    }
}

impl Launch {
    /// Reads the setting `accelerate_config` of TRL: a settings file of accelerate, or the name of one that TRL brings.
    pub fn accelerate_config(
        &mut self,
        name: &str,
        environment: &HashMap<String, String>,
        read: &impl Fn(&Path) -> Option<String>,
    ) {
        // The files that TRL brings have eight processes, but single_gpu.
        let own = if name.ends_with(".yaml") { None } else { read(Path::new(&format!("{name}.yaml"))) };
        let text = own.or_else(|| read(Path::new(name)));
        let words = ["accelerate", "--config_file", name].map(str::to_owned);
        match (name, text) {
            (_, Some(text)) => *self = of(&words, environment, &|_| Some(text.clone())),
            ("single_gpu", None) => {}
            ("multi_gpu" | "zero1" | "zero2" | "zero3" | "fsdp1" | "fsdp2", None) => {
                let kind = if name.starts_with("zero") { "DEEPSPEED" } else { "FSDP" };
                let kind = if name == "multi_gpu" { "MULTI_GPU" } else { kind };
                let stage = name.trim_start_matches("zero").parse::<u64>().unwrap_or_default();
                let own = format!(
                    "distributed_type: {kind}\ndeepspeed_config: {{zero_stage: {stage}}}\nnum_processes: 8\n"
                );
                *self = of(&words, environment, &|_| Some(own.clone()));
            }
            _ => self.lacks_config(name),
        }
    }

    fn lacks_config(&mut self, file: &str) {
        self.open.push(format!(
            "{file}, a settings file of accelerate, was not found; write its `num_processes` as `nproc_per_node`."
        ));
    }

    /// Reads a settings file of accelerate. Returns the number of all processes.
    fn accelerate(&mut self, json: &Json, file: &str) -> Option<(String, String)> {
        let text = |json: &Json| match json {
            Json::String(text) => text.clone(),
            other => other.to_string(),
        };
        if let Some(machines) = json.get("num_machines").and_then(|value| number(&text(value))) {
            self.machines = machines;
        }
        let deepspeed = &json["deepspeed_config"];
        let kind = text(&json["distributed_type"]).to_ascii_uppercase();
        if kind == "DEEPSPEED" {
            if let Some(&shard) =
                deepspeed["zero_stage"].as_u64().and_then(|stage| STAGES.get(stage as usize))
            {
                self.shard = Some((shard, format!("`zero_stage` of {file}")));
            }
            self.offloads |= matches!(deepspeed["offload_optimizer_device"].as_str(), Some("cpu" | "nvme"));
        }
        if kind == "FSDP" {
            let own = &json["fsdp_config"];
            let strategy = ["fsdp_sharding_strategy", "fsdp_reshard_after_forward"]
                .iter()
                .find_map(|name| own.get(name));
            let shard = strategy.and_then(|strategy| fsdp(&text(strategy))).unwrap_or("weights");
            self.shard = Some((shard, format!("`fsdp_config` of {file}")));
        }
        let all = json.get("num_processes").map(&text)?;
        Some((format!("num_processes of {file}"), all))
    }

    /// Sets what the processes hold a part of from the name of a file or a setting, such as zero3_offload.
    fn stage_by_name(&mut self, name: &str) -> bool {
        let own = name.rsplit('/').next().unwrap_or(name).to_ascii_lowercase();
        let stage = own
            .split_once("zero")
            .and_then(|(_, rest)| rest.trim_start_matches(['_', '-']).chars().next()?.to_digit(10));
        let found = stage.and_then(|stage| STAGES.get(stage as usize));
        if let Some(&shard) = found {
            self.shard = Some((shard, format!("the name {own}")));
            self.offloads |= own.contains("offload") && !own.contains("no_offload");
        } else if own.contains("fsdp") {
            self.shard = Some(("weights", format!("the name {own}")));
        }
        found.is_some()
    }

    /// Reads the setting `deepspeed`: a file, or a name that stands for one.
    pub fn deepspeed(&mut self, file: &str, read: &impl Fn(&Path) -> Option<String>) {
        let json = read(Path::new(file)).and_then(|text| serde_json::from_str::<Json>(&text).ok());
        match json {
            Some(json) => {
                let zero = &json["zero_optimization"];
                if let Some(&shard) = zero["stage"].as_u64().and_then(|stage| STAGES.get(stage as usize)) {
                    self.shard = Some((shard, format!("the stage in {file}")));
                }
                self.offloads |= matches!(zero["offload_optimizer"]["device"].as_str(), Some("cpu" | "nvme"));
            }
            None if self.stage_by_name(file) => {}
            None => self.open.push(format!(
                "{file}, a settings file of DeepSpeed, was not found; write its stage as `shard`."
            )),
        }
    }
}
