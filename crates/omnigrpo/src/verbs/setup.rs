//! Settings to plans: what several commands build alike.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use omnigrpo_data::{
    Dataset, DatasetSpec, MediumOptions, ReadOptions, Registry, Roots, ThinkMode as RowThink,
};
use omnigrpo_models::{
    FrameRule, MediaSettings, Model, PromptBuilder, PromptSettings, WeightDtype, open_family,
};
use omnigrpo_rewards::{DocumentFrequencies, RewardSet, references};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_text::RenderOptions;

use crate::explain::Problem;
use crate::settings::{FrameSampling, Settings, ThinkMode, TorchDtype};

/// The checkpoint directory that `--model_name_or_path` names: a directory, or a model in the local Hugging Face cache.
pub fn checkpoint_dir(settings: &Settings) -> Result<PathBuf> {
    let Some(name) = &settings.model.model_name_or_path else {
        return Err(Problem::usage("no model is given").expected("`--model_name_or_path DIR`").into());
    };
    let path = PathBuf::from(name);
    if path.is_dir() {
        return Ok(path);
    }
    let cache = hub_cache();
    let repo = cache.join(format!("models--{}", name.replace('/', "--")));
    let snapshot = std::fs::read_to_string(repo.join("refs/main"))
        .ok()
        .map(|revision| repo.join("snapshots").join(revision.trim()))
        .filter(|dir| dir.is_dir());
    snapshot.ok_or_else(|| {
        Problem::failure("the model was not found")
            .got(format!("`{name}`"))
            .expected(format!("a checkpoint directory, or a model in the local cache {}", cache.display()))
            .help("download it with `hf download NAME`, or give the directory")
            .into()
    })
}

fn hub_cache() -> PathBuf {
    let var = |name: &str| std::env::var_os(name).map(PathBuf::from);
    var("HF_HUB_CACHE")
        .or_else(|| var("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| var("HOME").map(|home| home.join(".cache/huggingface/hub")))
        .unwrap_or_else(|| PathBuf::from(".cache/huggingface/hub"))
}

/// The dtype weights are held in.
pub fn weight_dtype(settings: &Settings) -> WeightDtype {
    match settings.model.torch_dtype {
        TorchDtype::Auto => WeightDtype::Auto,
        TorchDtype::Float32 => WeightDtype::Float32,
        TorchDtype::Bfloat16 => WeightDtype::BFloat16,
    }
}

/// Loads the model, or makes a random one from its configuration.
pub fn model(settings: &Settings) -> Result<Model> {
    let dir = checkpoint_dir(settings)?;
    Ok(match settings.model.init_weights {
        Some(seed) => Model::random(&dir, seed, weight_dtype(settings))?,
        None => Model::load(&dir, weight_dtype(settings))?,
    })
}

/// Makes prompts for the checkpoint in `dir`. `training` lets rows draw their number of frames.
pub fn prompts(settings: &Settings, dir: &Path, training: bool) -> Result<PromptBuilder> {
    let media = &settings.media;
    let video = MediumOptions {
        fps: media.nframes.is_none().then_some(media.fps),
        nframes: media.nframes,
        min_frames: Some(media.video_min_frames),
        max_frames: Some(media.video_max_frames),
        min_pixels: media.video_min_frame_pixels,
        max_pixels: media.video_max_frame_pixels,
        total_pixels: media.total_pixels,
        ..MediumOptions::default()
    };
    let image = MediumOptions {
        min_pixels: media.min_pixels,
        max_pixels: media.max_pixels,
        ..MediumOptions::default()
    };
    let interval_secs = media.base_interval;
    let rule = match media.frame_sampling {
        FrameSampling::QwenVlUtils => FrameRule::Qwen,
        FrameSampling::BaseInterval => FrameRule::BaseInterval { interval_secs },
        FrameSampling::Meta => FrameRule::Segments { interval_secs },
    };
    let prompt = PromptSettings {
        media: MediaSettings { image, video, rule, dynamic_sample: training, seed: settings.run.data_seed },
        render: RenderOptions {
            system: settings.prompt.system_prompt.clone(),
            kwargs: settings.prompt.chat_template_kwargs.clone(),
            ..RenderOptions::default()
        },
        max_prompt_length: settings.prompt.max_prompt_length,
        max_completion_length: settings.rollout.max_completion_length,
        stop_strings: settings.rollout.stop_strings.clone(),
    };
    Ok(PromptBuilder::open(dir, open_family(dir)?, prompt)?)
}

/// Roots of relative media paths.
pub fn roots(settings: &Settings) -> Roots {
    let data = &settings.data;
    Roots {
        images: data.image_folders.clone(),
        videos: data.video_folders.clone(),
        audios: data.audio_folders.clone(),
    }
}

/// How rows are read.
pub fn read_options(settings: &Settings) -> ReadOptions {
    ReadOptions {
        template: settings.prompt.question_template,
        think: match settings.rewards.think {
            ThinkMode::Auto => None,
            ThinkMode::On => Some(RowThink::On),
            ThinkMode::Off => Some(RowThink::Off),
        },
        allow_urls: false,
        seed: settings.run.data_seed,
    }
}

/// The training rows.
pub fn train_data(settings: &Settings) -> Result<Arc<Dataset>> {
    let data = &settings.data;
    let roots = roots(settings);
    let specs = if let Some(replay) = &settings.rollout.replay {
        DatasetSpec::from_files(std::slice::from_ref(replay), &roots)?
    } else if !data.train_file.is_empty() {
        DatasetSpec::from_files(&data.train_file, &roots)?
    } else if !data.data_file_paths.is_empty() {
        DatasetSpec::from_files(&data.data_file_paths, &roots)?
    } else {
        from_registry(settings, &data.dataset_use, &roots)?
    };
    Ok(Arc::new(Dataset::open(&specs, &read_options(settings))?))
}

/// The evaluation rows, if any are given apart from the training rows.
pub fn eval_data(settings: &Settings) -> Result<Option<Arc<Dataset>>> {
    let data = &settings.data;
    let roots = roots(settings);
    let specs = if !data.eval_file.is_empty() {
        DatasetSpec::from_files(&data.eval_file, &roots)?
    } else if !data.eval_dataset_use.is_empty() {
        from_registry(settings, &data.eval_dataset_use, &roots)?
    } else {
        return Ok(None);
    };
    Ok(Some(Arc::new(Dataset::open(&specs, &read_options(settings))?)))
}

fn from_registry(settings: &Settings, names: &[String], roots: &Roots) -> Result<Vec<DatasetSpec>> {
    let Some(path) = &settings.data.dataset_registry else {
        return Err(Problem::usage("dataset names without a registry")
            .expected("`--dataset_registry FILE`")
            .into());
    };
    Ok(Registry::open(path)?.select(&names.join(","), roots)?)
}

/// The rewards. `cider` weighs words by how many of the rows in `corpus` have them.
pub fn rewards(settings: &Settings, corpus: &Dataset) -> Result<RewardSet> {
    let mut options = settings.rewards.options(settings.rollout.max_completion_length);
    if settings.rewards.reward_funcs.iter().any(|name| name == "cider") {
        let mut frequencies = DocumentFrequencies::default();
        for row in 0..corpus.len() {
            // A row that cannot be read is reported where it would be used.
            if let Ok(sample) = corpus.get(row) {
                frequencies.add_item(&references(&sample.columns, sample.solution.as_deref()));
            }
        }
        options.cider = Some(Arc::new(frequencies));
    }
    omnigrpo_rewards::build(&settings.rewards.reward_funcs, &options)
        .map_err(|e| Problem::usage(e.to_string()).at("--reward_funcs").into())
}

/// How completions are sampled.
pub fn sampling(settings: &Settings) -> SamplingParams {
    let r = &settings.rollout;
    SamplingParams {
        temperature: r.temperature as f32,
        top_p: r.top_p as f32,
        top_k: r.top_k,
        min_p: r.min_p as f32,
        repetition_penalty: r.repetition_penalty as f32,
        max_completion_length: r.max_completion_length,
        min_completion_length: r.min_completion_length,
        logprob_temperature: Some(r.logprob_temperature as f32),
        seed: settings.run.seed,
    }
}
