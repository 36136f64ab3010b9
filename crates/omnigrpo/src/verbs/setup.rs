//! Settings to plans: what several commands build alike.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use omnigrpo_data::{
    DataError, Dataset, DatasetSpec, Fetch, MediumOptions, ReadOptions, Registry, Roots,
    ThinkMode as RowThink,
};
use omnigrpo_fetch::{FetchError, Hub, HubOptions, Step, UrlMedia, UrlOptions, is_model_name};
use omnigrpo_models::{
    Checkpoint, Family, FrameRule, Limits, LoadOptions, LoraConfig, MediaSettings, Model, Part,
    PromptBuilder, PromptSettings, QuantBits, Quantization, WeightDtype, adapter_base, whole_tensors,
};
use omnigrpo_observe::Console;
use omnigrpo_rewards::{Compat, DocumentFrequencies, Measures, Named as _, RewardSet, references};
use omnigrpo_rollout::SamplingParams;
use omnigrpo_scorers::ScorerOptions;
use omnigrpo_text::RenderOptions;
use omnigrpo_train::{MemoryPlan, Selection};

use super::humanomni::overrides;
use super::memory;
use crate::explain::Problem;
use crate::settings::{
    AllowUrls, FrameSampling, HubEnvironment, MissingAudio, REGISTRY, Settings, ThinkMode, TorchDtype,
};

/// The checkpoint directory that `--model_name_or_path` names: a directory, or a model in the local Hugging Face cache.
pub fn checkpoint_dir(settings: &Settings) -> Result<PathBuf> {
    let Some(name) = &settings.model.model_name_or_path else {
        return Err(Problem::usage("no model is given").expected("`--model_name_or_path DIR`").into());
    };
    Ok(named_dir("the model", name, settings)?)
}

/// Opens that checkpoint, with what flags change about it.
pub fn checkpoint(settings: &Settings) -> Result<Checkpoint> {
    let dir = checkpoint_dir(settings)?;
    Checkpoint::open_with(&dir, |config| overrides(settings, &dir, config))
}

/// A directory, or a model of the Hugging Face hub, which is fetched unless it is in the local cache.
pub fn named_dir(what: &str, name: &str, settings: &Settings) -> Result<PathBuf, Problem> {
    let path = PathBuf::from(name);
    if path.is_dir() {
        let adapter = adapter_base(&path).map_err(|e| Problem::from_error(&e.into()))?;
        if let (false, Some(base)) = (path.join("config.json").is_file(), adapter) {
            return Err(Problem::usage("the directory holds an adapter, not a checkpoint")
                .at(path.display().to_string())
                .expected("the checkpoint it was trained on, and the adapter beside it")
                .help(format!("--model_name_or_path {base} --adapter_name_or_path {}", path.display())));
        }
        return Ok(path);
    }
    let hub = &settings.env.hub;
    // Another program may have fetched only a tokenizer.
    if let Some(dir) = cached(name, settings)
        && (hub.offline || has_weights(&dir))
    {
        return Ok(dir);
    }
    let missing = || {
        Problem::failure(format!("{what} was not found")).got(format!("`{name}`")).expected(format!(
            "a checkpoint directory, a model in the local cache {}, or one of the hub {}",
            hub.cache.display(),
            hub.endpoint
        ))
    };
    if !is_model_name(name) {
        return Err(missing().help("correct the path"));
    }
    if hub.offline {
        return Err(
            missing().help("HF_HUB_OFFLINE is set: unset it, or copy what `hf download` fetched elsewhere")
        );
    }
    fetch(name, hub).map_err(|error| match error {
        FetchError::NoModel { .. } | FetchError::Denied { .. } => missing().help(error.to_string()),
        _ => missing().help(format!("it could not be fetched: {error}")),
    })
}

/// Fetches a model of the hub into the local cache. What is missing of one that is partly there is added.
fn fetch(name: &str, hub: &HubEnvironment) -> Result<PathBuf, FetchError> {
    let kept = || {
        let text = std::fs::read_to_string(&hub.token_file).ok()?;
        Some(text.trim().to_owned()).filter(|token| !token.is_empty())
    };
    let client = Hub::new(HubOptions {
        endpoint: hub.endpoint.clone(),
        token: hub.token.clone().or_else(kept),
        cache: hub.cache.clone(),
    });
    let console = Console::stderr(false);
    let (mut bar, mut num_bytes) = (None, 0u64);
    client.download(name, "main", &mut |step| match step {
        Step::Begin { num_files, num_bytes } if num_files > 0 => {
            let mb = num_bytes.div_ceil(MB);
            console
                .line(&format!("fetching {name} from {}: {num_files} weight files, {mb} MB", hub.endpoint));
            bar = Some(console.progress("fetching, MB", mb));
        }
        Step::Begin { .. } => {}
        Step::Bytes(more) => {
            let before = num_bytes / MB;
            num_bytes += more;
            if let Some(bar) = &mut bar {
                bar.advance(num_bytes / MB - before);
            }
        }
    })
}

const MB: u64 = 1_000_000;

/// The directory of a model in the local Hugging Face cache.
pub fn cached(name: &str, settings: &Settings) -> Option<PathBuf> {
    let repo = settings.env.hub.cache.join(format!("models--{}", name.replace('/', "--")));
    let revision = std::fs::read_to_string(repo.join("refs/main")).ok()?;
    Some(repo.join("snapshots").join(revision.trim())).filter(|dir| dir.is_dir())
}

fn has_weights(dir: &Path) -> bool {
    std::fs::read_dir(dir).is_ok_and(|mut files| {
        files.any(|file| {
            file.is_ok_and(|file| file.path().extension().is_some_and(|ending| ending == "safetensors"))
        })
    })
}

/// The dtype weights are held in.
pub fn weight_dtype(settings: &Settings) -> WeightDtype {
    match settings.model.torch_dtype {
        TorchDtype::Auto => WeightDtype::Auto,
        TorchDtype::Float32 => WeightDtype::Float32,
        TorchDtype::Bfloat16 => WeightDtype::BFloat16,
    }
}

/// What is trained whole.
pub fn selection(settings: &Settings, family: &Family) -> Selection {
    let optim = &settings.optim;
    let frozen = |part| optim.freeze_vision_modules && family.row().vision_modules.contains(&part);
    Selection {
        llm: optim.tune_mm_llm,
        projector: optim.tune_mm_mlp && !frozen(Part::Projector),
        towers: optim.tune_mm_vision && !frozen(Part::Vision),
        instruction: optim.tune_bert,
        gate: optim.tune_gate,
        patterns: optim.trainable_patterns.clone(),
    }
}

/// Loads the model with its adapter, or makes a random one from its configuration.
pub fn model(settings: &Settings, checkpoint: &Checkpoint) -> Result<Model> {
    load(settings, checkpoint, &Selection::NONE, &|_| Ok(()))
}

/// The model to train: as [`model`], with a new adapter where one is asked for. What will not fit into memory is a warning,
/// before anything is loaded.
pub fn trained_model(settings: &Settings, checkpoint: &Checkpoint, with_reference: bool) -> Result<Model> {
    let selection = selection(settings, checkpoint.family());
    let lora = settings.optim.use_peft.then(|| lora(settings));
    let plan = MemoryPlan {
        selection: Some(&selection),
        lora: lora.as_ref(),
        ..memory_plan(settings, with_reference)
    };
    let mut model = load(settings, checkpoint, &selection, &|outline| {
        memory::warn(&omnigrpo_train::memory(outline, &plan)?);
        Ok(())
    })?;
    if let Some(lora) = lora.filter(|_| settings.model.adapter_name_or_path.is_none()) {
        model.add_lora(&lora)?;
    }
    Ok(model)
}

/// The adapters of a run.
pub fn lora(settings: &Settings) -> LoraConfig {
    let optim = &settings.optim;
    LoraConfig {
        rank: optim.lora_r,
        alpha: optim.lora_alpha,
        dropout: optim.lora_dropout,
        rslora: optim.use_rslora,
        targets: optim.lora_target_modules.clone(),
        seed: settings.run.seed,
    }
}

/// A run's memory, apart from what is trained.
pub fn memory_plan(settings: &Settings, reference: bool) -> MemoryPlan<'static> {
    MemoryPlan {
        selection: None,
        lora: None,
        pure_bf16: settings.model.pure_bf16,
        reference,
        stream_rows: settings.model.max_stream_tokens.unwrap_or(super::train::STREAM_ROWS),
        recompute: settings.model.gradient_checkpointing,
    }
}

/// Loads a model that fits into memory; `before` sees its outline first.
fn load(
    settings: &Settings,
    checkpoint: &Checkpoint,
    trained: &Selection,
    before: &dyn Fn(&Model) -> Result<()>,
) -> Result<Model> {
    let adapter = settings.model.adapter_name_or_path.as_deref();
    let bits = match (settings.model.load_in_8bit, settings.model.load_in_4bit) {
        (true, _) => Some(QuantBits::Eight),
        (_, true) => Some(QuantBits::Four),
        _ => None,
    };
    let whole = match (adapter, bits) {
        (Some(adapter), Some(_)) => whole_tensors(adapter, checkpoint.family().format())?,
        _ => BTreeSet::new(),
    };
    let trained = trained.matcher()?;
    let keep = |name: &str, part: Part| whole.contains(name) || trained(name, part);
    let options = LoadOptions {
        dtype: weight_dtype(settings),
        quantization: bits.map(|bits| Quantization { bits, keep: &keep }),
        ..LoadOptions::default()
    };
    let outline = Model::outline(checkpoint, &options, settings.model.init_weights.is_some())?;
    memory::weights_fit(&outline)?;
    before(&outline)?;
    drop(outline);
    let mut model = match settings.model.init_weights {
        Some(seed) => Model::random(checkpoint, seed, &options)?,
        None => Model::load_with(checkpoint, &options)?,
    };
    if let Some(adapter) = adapter {
        model.load_adapter(adapter)?;
    }
    Ok(model)
}

/// Makes prompts for a checkpoint. `training` lets rows draw their number of frames.
pub fn prompts(settings: &Settings, checkpoint: &Checkpoint, training: bool) -> Result<PromptBuilder> {
    prompts_with(settings, checkpoint, training, false)
}

/// As [`prompts`] of training, with the frames of videos in another order.
pub fn shuffled_prompts(settings: &Settings, checkpoint: &Checkpoint) -> Result<PromptBuilder> {
    prompts_with(settings, checkpoint, true, true)
}

fn prompts_with(
    settings: &Settings,
    checkpoint: &Checkpoint,
    training: bool,
    shuffle_frames: bool,
) -> Result<PromptBuilder> {
    let media = &settings.media;
    // Some have a default, which is nothing to those that do not read them.
    let reads = |flag: &str| !checkpoint.family().processor().idle_settings().flags.contains(&flag);
    let video = MediumOptions {
        fps: (media.nframes.is_none() && reads("fps")).then_some(media.fps),
        nframes: media.nframes,
        min_frames: reads("video_min_frames").then_some(media.video_min_frames),
        max_frames: reads("video_max_frames").then_some(media.video_max_frames),
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
        media: MediaSettings {
            image,
            video,
            rule,
            dynamic_sample: training,
            shuffle_frames,
            seed: settings.run.data_seed,
            epoch: 0,
            missing_audio: match settings.data.missing_audio {
                MissingAudio::Error => omnigrpo_models::MissingAudio::Error,
                MissingAudio::Silence => omnigrpo_models::MissingAudio::Silence,
            },
            limits: limits(settings),
            max_tiles: media.max_anyres_num,
        },
        render: RenderOptions {
            system: settings.prompt.system_prompt.clone(),
            kwargs: settings.prompt.chat_template_kwargs.clone(),
            ..RenderOptions::default()
        },
        max_prompt_length: settings.prompt.max_prompt_length,
        max_completion_length: settings.rollout.max_completion_length,
        stop_strings: settings.rollout.stop_strings.clone(),
    };
    Ok(PromptBuilder::open(checkpoint, prompt)?)
}

/// What reading one medium may cost.
pub fn limits(settings: &Settings) -> Limits {
    Limits {
        timeout: std::time::Duration::from_secs_f64(settings.data.media_timeout_secs),
        ..Limits::default()
    }
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
        fetch: fetch_media(settings),
        cache_dir: Some(settings.env.cache_dir.clone()),
        missing_media: false,
        seed: settings.run.data_seed,
        use_audio_in_video: settings.data.use_audio_in_video,
        columns: settings.data.columns.clone(),
    }
}

/// Largest medium that is fetched, bytes.
const MAX_URL_BYTES: u64 = 1 << 30;

/// What brings media by address, where they are allowed.
fn fetch_media(settings: &Settings) -> Option<Fetch> {
    let allow_private = match settings.data.allow_urls {
        AllowUrls::Off => return None,
        AllowUrls::Public => false,
        AllowUrls::All => true,
    };
    let media = UrlMedia::new(UrlOptions {
        cache_dir: settings.env.cache_dir.clone(),
        allow_private,
        max_bytes: MAX_URL_BYTES,
        timeout: std::time::Duration::from_secs_f64(settings.data.media_timeout_secs),
    });
    Some(Fetch(Arc::new(move |url| media.fetch(url).map_err(|error| error.to_string()))))
}

/// The rows of `--input`; `-` is standard input. With `missing_media` those are read, too, whose media are not there.
pub fn input_rows(settings: &Settings, input: &Path, missing_media: bool) -> Result<Arc<Dataset>> {
    let input = if input == Path::new("-") { PathBuf::from("/dev/stdin") } else { input.to_owned() };
    let options = ReadOptions { missing_media, ..read_options(settings) };
    open_with(&DatasetSpec::from_files(&[input], &roots(settings))?, &options)
}

/// Whether any flag names training rows.
pub fn names_training_rows(settings: &Settings) -> bool {
    let data = &settings.data;
    !(data.train_file.is_empty() && data.data_file_paths.is_empty() && data.dataset_use.is_empty())
}

/// The training rows.
pub fn train_data(settings: &Settings) -> Result<Arc<Dataset>> {
    let data = &settings.data;
    let roots = roots(settings);
    let mut specs = if let Some(replay) = &settings.rollout.replay {
        DatasetSpec::from_files(std::slice::from_ref(replay), &roots)?
    } else if !data.train_file.is_empty() {
        DatasetSpec::from_files(&data.train_file, &roots)?
    } else if !data.data_file_paths.is_empty() {
        DatasetSpec::from_files(&data.data_file_paths, &roots)?
    } else {
        from_registry(settings, &data.dataset_use, &roots)?
    };
    let modes = &settings.rewards.accuracy_mode;
    if modes.len() > 1 {
        if modes.len() != specs.len() {
            return Err(Problem::usage("`accuracy_mode` and the training files differ in number")
                .got(format!("{} rules for {} files", modes.len(), specs.len()))
                .expected("one rule for all, or one per file, in the same order")
                .into());
        }
        for (spec, mode) in specs.iter_mut().zip(modes) {
            spec.columns.entry("reward_method").or_insert_with(|| mode.name().into());
        }
    }
    open(&specs, settings)
}

/// Opens rows as they are read everywhere.
fn open(specs: &[DatasetSpec], settings: &Settings) -> Result<Arc<Dataset>> {
    open_with(specs, &read_options(settings))
}

/// Opens rows. A file that is not there may be one that `data convert` makes.
fn open_with(specs: &[DatasetSpec], options: &ReadOptions) -> Result<Arc<Dataset>> {
    let dataset = Dataset::open(specs, options).map_err(|e| match &e {
        DataError::Io { path, source, .. } if source.kind() == std::io::ErrorKind::NotFound => {
            let problem = Problem::failure("the dataset is not there")
                .at(path.display().to_string())
                .got(source.to_string())
                .expected("a file of rows");
            let is_vivqa = path.to_string_lossy().to_lowercase().contains("vivqa");
            match is_vivqa {
                true => problem.help(format!(
                    "correct the path; rows of ViVQA-X are made by `omnigrpo data convert vivqa-x --input \
                     ViVQA-X_train.json --output {}`",
                    path.display()
                )),
                false => problem.help("correct the path"),
            }
            .into()
        }
        _ => anyhow::Error::from(e),
    })?;
    Ok(Arc::new(dataset))
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
    open(&specs, settings).map(Some)
}

fn from_registry(settings: &Settings, names: &[String], roots: &Roots) -> Result<Vec<DatasetSpec>> {
    let path = settings.data.dataset_registry.as_deref().unwrap_or(Path::new(REGISTRY));
    Ok(Registry::open(path)?.select(&names.join(","), roots)?)
}

/// Where a run keeps the document frequencies of its training references.
const FREQUENCIES: &str = "document_frequencies.json";

/// The references that `cider` and `explanation` weigh words by, and `bertscore` tokens if asked.
#[derive(Default)]
pub struct Corpus {
    frequencies: Option<Arc<DocumentFrequencies>>,
    references: Vec<String>,
}

impl Corpus {
    /// Counts the references of these rows; none where no reward asks for them.
    pub fn of(settings: &Settings, dataset: &Dataset, rows: impl IntoIterator<Item = u64>) -> Self {
        let asked = &settings.rewards;
        let wants = |name: &str| asked.reward_funcs.iter().any(|func| func == name);
        let weigh_tokens = wants("bertscore") && asked.bertscore_idf;
        if !(wants("cider") || wants("explanation") || weigh_tokens) {
            return Self::default();
        }
        let mut frequencies = DocumentFrequencies::default();
        let mut texts = Vec::new();
        for row in rows {
            // A row that cannot be read is reported where it would be used.
            let Ok(sample) = dataset.get(row) else { continue };
            let references = references(&sample.columns, sample.solution.as_deref());
            // A row without references would make every word look rarer.
            if references.is_empty() {
                continue;
            }
            frequencies.add_item(&references);
            if weigh_tokens {
                texts.extend(references.into_iter().map(str::to_owned));
            }
        }
        Self { frequencies: Some(Arc::new(frequencies)), references: texts }
    }

    /// With the counts of the run that made the checkpoint in `dir`, where it kept them: a score then means what it
    /// meant in training.
    pub fn or_of_run(mut self, dir: &Path) -> Result<Self> {
        let kept = [Some(dir), dir.parent()].into_iter().flatten().map(|dir| dir.join(FREQUENCIES));
        if let (Some(_), Some(path)) = (&self.frequencies, kept.into_iter().find(|path| path.is_file())) {
            let broken = |e: String| {
                Problem::failure("the run's document frequencies cannot be read")
                    .at(path.display().to_string())
                    .got(e)
                    .help("remove the file to count the references of the evaluated rows instead")
            };
            let text = std::fs::read(&path).map_err(|e| broken(e.to_string()))?;
            let kept = serde_json::from_slice(&text).map_err(|e| broken(e.to_string()))?;
            self.frequencies = Some(Arc::new(kept));
        }
        Ok(self)
    }

    /// Name and content of the file that keeps the counts in the run directory, for evaluations of its checkpoints.
    pub fn file(&self) -> Result<Option<(&'static str, Vec<u8>)>> {
        let Some(frequencies) = &self.frequencies else { return Ok(None) };
        Ok(Some((FREQUENCIES, serde_json::to_vec(frequencies.as_ref())?)))
    }
}

/// The rewards.
pub fn rewards(settings: &Settings, corpus: &Corpus) -> Result<RewardSet> {
    let asked = &settings.rewards;
    let wants = |name: &str| asked.reward_funcs.iter().any(|func| func == name);
    let mut options = asked.options(settings.rollout.max_completion_length);
    options.external.judge_api_key = settings.env.judge_api_key.clone();
    if let Some(path) = &asked.judge_prompt {
        options.external.judge_template = judge_prompt(path)?;
    }
    options.cider = corpus.frequencies.clone();
    let dir = |flag: &str, wanted: bool, name: &Option<String>| {
        let name = name.as_ref().filter(|_| wanted);
        name.map(|name| named_dir("the model", name, settings).map_err(|problem| problem.at(flag)))
            .transpose()
    };
    let pictures = wants("explanation") && asked.explanation_clip_weight > 0.0;
    let scorers = ScorerOptions {
        clip_model: dir("--clip_model", pictures, &asked.clip_model)?,
        clip_text_model: dir("--clip_text_model", pictures, &asked.clip_text_model)?,
        explanation_clip_weight: asked.explanation_clip_weight,
        explanation_compat: asked.compat.contains(&Compat::S4Explanation),
        bertscore_model: dir("--bertscore_model", wants("bertscore"), &asked.bertscore_model)?,
        bertscore_layer: asked.bertscore_layer,
        bertscore_idf: asked.bertscore_idf,
        bertscore_baseline: asked.bertscore_baseline.clone(),
        frequencies: options.cider.clone(),
        references: corpus.references.clone(),
        dtype: WeightDtype::Auto,
    };
    let made = omnigrpo_scorers::table()
        .iter()
        .filter(|row| wants(row.name))
        .map(|row| (row.make)(&scorers).map_err(|e| Problem::failure(e.to_string()).at("--reward_funcs")))
        .collect::<Result<Vec<_>, _>>()?;
    omnigrpo_rewards::build_with(&asked.reward_funcs, &options, made)
        .map_err(|e| Problem::usage(e.to_string()).at("--reward_funcs").into())
}

/// What a judge is asked, from a file.
fn judge_prompt(path: &Path) -> Result<String> {
    const MAX_BYTES: u64 = 64 << 10;
    let problem = |got: String| {
        Problem::usage("the judge's prompt cannot be used").at(path.display().to_string()).got(got).expected(
            "a text with `{answer}` or `{completion}` in it, and a request for a number from 0 to 1",
        )
    };
    let mut text = String::new();
    std::fs::File::open(path)
        .and_then(|file| {
            std::io::Read::read_to_string(&mut std::io::Read::take(file, MAX_BYTES + 1), &mut text)
        })
        .map_err(|e| problem(e.to_string()))?;
    if text.len() as u64 > MAX_BYTES {
        return Err(problem(format!("more than {MAX_BYTES} bytes")).into());
    }
    if !text.contains("{answer}") && !text.contains("{completion}") {
        return Err(problem("a text that shows the judge nothing to grade".to_owned()).into());
    }
    Ok(text)
}

/// Those of the rewards that need neither a model nor another program, if there are any: enough to ask about rows.
pub fn text_rewards(settings: &Settings, dataset: &Dataset) -> Result<Option<RewardSet>> {
    let mut textual = settings.clone();
    let asked = &mut textual.rewards;
    let is_built_in = |name: &String| omnigrpo_rewards::table().iter().any(|row| row.name == name);
    asked.reward_funcs.retain(is_built_in);
    asked.reward_weights = vec![1.0; asked.reward_funcs.len()];
    if asked.reward_funcs.is_empty() {
        return Ok(None);
    }
    rewards(&textual, &Corpus::of(&textual, dataset, 0..dataset.len())).map(Some)
}

/// Has rewards outside of this process score one made-up completion of the first of the rows that can be read, so that
/// one that cannot be started or reached is found before hours of sampling.
pub fn probe_rewards(
    rewards: &RewardSet,
    dataset: &Dataset,
    rows: impl IntoIterator<Item = u64>,
    prompts: &PromptBuilder,
) -> Result<()> {
    let Some(sample) = rows.into_iter().find_map(|row| dataset.get(row).ok()) else { return Ok(()) };
    let solution = sample.solution.as_deref().unwrap_or("nothing");
    let answer = if solution.contains("<answer>") {
        solution.to_owned()
    } else {
        format!("<answer>{solution}</answer>")
    };
    let text = format!("<think>A trial before the run.</think>{answer}");
    let ids = prompts.completion_ids(&text)?;
    omnigrpo_train::probe(rewards, &sample, text, ids).map_err(|e| {
        Problem::failure(e.to_string())
            .at("--reward_funcs")
            .help(
                "it was asked for one score before the run, as docs/rewards.md says; nothing was sampled yet",
            )
            .into()
    })
}

/// What an evaluation measures besides the rewards.
pub fn measures(settings: &Settings) -> Measures {
    Measures {
        answer_policy: settings.rewards.answer_policy,
        accuracy_threshold: settings.eval.accuracy_threshold,
        labels: settings.eval.labels.clone(),
    }
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
