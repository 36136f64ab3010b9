//! Prompt builders of a command.

use std::sync::Arc;

use anyhow::Result;
use omnigrpo_guard::told;
use omnigrpo_models::{Checkpoint, MediaSettings, Opening, PromptBuilder, PromptSettings};
use omnigrpo_rewards::ExternalOptions;
use omnigrpo_rollout::{Environment, Interaction};

use super::rewards::Functions;
use omnigrpo_settings::{Problem, Settings, of_caller};

/// Returns the builder of prompts for a checkpoint. With `dynamic_sample`, which is for training, the number of frames of a row may be
/// random, and a teacher may read a column of it. The prompts describe the tools of the environment, and begin with what it shows.
pub fn prompts(
    settings: &Settings,
    checkpoint: &Checkpoint,
    (dynamic_sample, shuffle_frames): (bool, bool),
    interaction: Option<Interaction>,
) -> Result<PromptBuilder> {
    let prompts = settings.prompts.clone();
    let media = MediaSettings { dynamic_sample, shuffle_frames, ..prompts.media };
    // Rows of evaluations need no column for a teacher.
    let privileged_context = prompts.privileged_context.filter(|_| dynamic_sample && !shuffle_frames);
    let settings = PromptSettings { media, privileged_context, ..prompts };
    let builder = PromptBuilder::open(checkpoint, settings)?;
    let Some(Interaction { environment, .. }) = interaction else { return Ok(builder) };
    let builder = builder.with_tools(environment.tools());
    Ok(builder.with_opening(Opening(Arc::new(move |row| environment.open(row)))))
}

/// Starts the environment with this name.
pub fn environment(
    name: &str,
    settings: &Settings,
    functions: &Functions,
) -> Result<Arc<dyn Environment>, Problem> {
    let Settings { io, env, prompts, .. } = settings;
    // Answers of evaluation and generation are kept with the user's other caches.
    let folder = io.output_dir.as_ref().map_or_else(|| env.turn_cache(), |dir| dir.join("media"));
    let folder = std::path::absolute(&folder).unwrap_or(folder);
    let (system, media) = (prompts.render.system.clone(), &prompts.media);
    let problem = |what: String| Problem::usage(what).at("--environment");
    let started = if of_caller(name).is_some() {
        let peer = functions.environment.clone().ok_or_else(|| {
            problem("the environment is in the program that started the run".to_owned())
                .got(format!("`{name}`"))
                .expected("an environment by name, a program, `FILE.py:NAME` or an address")
                .help("start the run from that program, or write the environment to a file")
        })?;
        omnigrpo_train::environment_of(peer, folder, media, system).map_err(|cause| told(&*cause))
    } else {
        let options = ExternalOptions { system, ..settings.rewards.options.external.clone() };
        omnigrpo_train::environment(name, folder, media, &options)
    };
    started.map_err(problem)
}

/// Returns the memory of decoded media that the settings give, bytes.
pub fn media_bytes(settings: &Settings) -> Option<u64> {
    const GIB: f64 = (1u64 << 30) as f64;
    settings.data.mm_processor_cache_gb.map(|given| (given * GIB) as u64)
}
