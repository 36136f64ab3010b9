//! Memory of a training run, estimated before anything is loaded.
//!
//! The sizes of weights, moments and masters follow from an outline of the model. The memory held during a pass is
//! measured: a step over real prompts runs on [`Device::Outline`], which has sizes but no numbers. It runs the code of an
//! ordinary step ([`update`](crate::update), [`imitate`](crate::imitate)). Every completion has the maximum length.
//!
//! The heap of the process keeps memory that was freed ([`Memory::peak`]). The caches of completions are mapped and unmapped.
//! The size of these caches is added to the peak of the passes, although both are not held at the same time. On a card, one pool
//! serves both, so the caches count only in the phases that have them.

use std::sync::Arc;
use std::time::Instant;

use omnigrpo_models::{AddedTurn, Features, Model, Prompt, ReferencePlace, SftExample};
use omnigrpo_observe::PhaseTimer;
use omnigrpo_ops::{
    Card, DecodeBatch, DecodeRows, Device, DrawFrom, Footprint, Held, Param, ParamDtype, Sampler, footprint,
    holding, in_arena, is_on_card, on_card, phase, repeated,
};
use omnigrpo_rewards::{Logged, RewardMatrix};
use omnigrpo_rollout::{Completion, FinishReason, MAX_LIVE};
use omnigrpo_text::{Role, Turn};

use crate::error::{DEVICE, Result, TrainError};
use crate::features::{self, Keep};
use crate::imitate::{StepExample, imitate};
use crate::lender::is_lent;
use crate::optimizer::{AdamW, AdamWConfig, Offload};
use crate::rollouts::{Group, Kept, Rollouts, Scored};
use crate::room;
use crate::rows::PreparedRow;
use crate::split::{Division, Shard};
use crate::step::{Algorithm, Divided, UpdateAt, update};

/// Owner of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryOf {
    /// Main memory of the machine, with everything in it.
    Host,
    /// Memory of a card, with weights, gradients and, unless it is offloaded, the optimizer's state.
    Card,
    /// Main memory of a run whose model is on a card: a copy of the weights, media, and what is offloaded.
    BesideCard,
}

/// Work of a step.
#[derive(Clone, Debug)]
pub enum Work {
    /// Rollout of these rows.
    Rollout(Vec<PreparedRow>),
    /// Supervised update with these examples.
    Examples(Vec<SftExample>),
    /// No update: the model only completes prompts.
    None,
}

/// Memory of a reference, without the weights that it shares with the policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReferenceKept {
    /// No reference.
    No,
    /// Copies of the trained weights.
    Copied,
    /// One weight at a time, if the other weights can be read from the checkpoint's files ([`ReferencePlace::Files`]).
    InPlace,
    /// Another model ([`MemoryPlan::own_reference`]).
    Own,
    /// The policy itself, which is its own teacher.
    Policy,
}

/// Settings that determine the memory of a run.
#[derive(Clone)]
pub struct MemoryPlan<'a> {
    /// Settings of the step.
    pub algorithm: &'a Divided,
    /// Settings of the optimizer.
    pub optimizer: &'a AdamWConfig,
    /// Longest rows of the run.
    pub work: Work,
    /// Outline of the largest answer of an environment ([`PromptBuilder::outline_turn`]). Every completion gets as many of them as
    /// the limits allow.
    ///
    /// [`PromptBuilder::outline_turn`]: omnigrpo_models::PromptBuilder::outline_turn
    pub answer: Option<Arc<Prompt>>,
    /// Prompts per update; a rollout may have the prompts of several updates.
    pub prompts_per_step: usize,
    /// Prompts that an evaluation completes at the same time, and the number of completions per prompt.
    pub evaluation: Option<(Vec<Arc<Prompt>>, usize)>,
    /// Storage of the reference weights.
    pub reference: ReferenceKept,
    /// Outline of the reference, if it is another model than the policy.
    pub own_reference: Option<Arc<Model>>,
    /// Memory that holds the model.
    pub of: MemoryOf,
}

impl MemoryPlan<'_> {
    /// Returns the largest answer of an environment, and the number of such answers that fit into a completion.
    fn answers(&self) -> Option<(&Arc<Prompt>, usize)> {
        let (sampling, answer) = (&self.algorithm.sampling, self.answer.as_ref()?);
        // A sampled token stands before each answer, and one after the last.
        let fit = sampling.max_completion_length.saturating_sub(1) / (answer.ids.len() + 1);
        Some((answer, sampling.turns?.max_turns.min(fit))).filter(|(_, turns)| *turns > 0)
    }
}

/// Bytes by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Process before anything is loaded: program, tokenizer and rows. The caller sets it.
    pub program: u64,
    /// Models of rewards. The caller sets it.
    pub rewards: u64,
    /// Weights except for those of adapters.
    pub weights: u64,
    /// Weights of adapters.
    pub adapters: u64,
    /// Moments and masters of the optimizer.
    pub optimizer: u64,
    /// Weights of the reference that are not shared with the policy.
    pub reference: u64,
    /// Most probable tokens of a teacher, and what the loss computes from them.
    pub teacher: u64,
    /// Gradients at the peak of the passes.
    pub gradients: u64,
    /// Decoded media of the current step and of the next one.
    pub media: u64,
    /// Decoded media that are stored for later passes over the data, without `media`. The caller sets it.
    pub media_store: u64,
    /// Pixels of the largest medium while it is decoded. The caller sets it.
    pub decoding: u64,
    /// Features of media and kept activations of towers, at the peak of the passes.
    pub features: u64,
    /// Activations at the peak of the passes.
    pub activations: u64,
    /// Keys and values of the completions that are being decoded.
    pub cache: u64,
    /// Arena of the recorded decoding steps of a card.
    pub recorded: u64,
    /// Workspace of the card's libraries.
    pub workspace: u64,
    /// Buffers in main memory that a card accesses.
    pub pinned: u64,
    /// Memory that the allocator cannot use.
    pub slack: u64,
    /// Files of the optimizer's state on a disk, which is no memory. They hold the moments and masters with [`Offload::File`].
    pub disk: u64,
    /// Phase with the peak memory.
    pub peak: Phase,
    /// Bytes of each value of the largest trained weight. They are zeros if nothing is trained.
    pub each: BytesEach,
}

/// Bytes of a trained value in one memory, without the scales of 8-bit moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BytesEach {
    /// The value.
    pub value: u64,
    /// The gradient of the value.
    pub gradient: u64,
    /// Both moments.
    pub moments: u64,
    /// The master, or on a card the half of it that the weight lacks.
    pub master: u64,
}

impl BytesEach {
    /// Returns the sum.
    pub fn total(&self) -> u64 {
        self.value + self.gradient + self.moments + self.master
    }
}

/// Phase of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Phase {
    /// Media towers, prompts and completions.
    Rollout,
    /// Reference, forward and backward pass.
    #[default]
    Update,
    /// Evaluation of the planned prompts.
    Evaluation,
}

impl Memory {
    /// Returns the sum of all parts.
    pub fn total(&self) -> u64 {
        self.parts().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Returns the memory that is in use from the first update to the end, regardless of the rows.
    pub fn lasting(&self) -> u64 {
        self.program
            + self.rewards
            + self.workspace
            + self.pinned
            + self.weights
            + self.adapters
            + self.optimizer
            + self.reference
    }

    /// Returns each part with its name.
    pub fn parts(&self) -> [(&'static str, u64); 18] {
        [
            ("program and rows", self.program),
            ("reward models", self.rewards),
            ("weights", self.weights),
            ("adapters", self.adapters),
            ("reference", self.reference),
            ("tokens of the teacher", self.teacher),
            ("moments and masters", self.optimizer),
            ("gradients", self.gradients),
            ("decoded media", self.media),
            ("media kept for later passes", self.media_store),
            ("a medium being decoded", self.decoding),
            ("features of media", self.features),
            ("activations", self.activations),
            ("cache of completions", self.cache),
            ("recorded decoding steps", self.recorded),
            ("workspace of libraries", self.workspace),
            ("pinned buffers", self.pinned),
            ("allocator", self.slack),
        ]
    }
}

/// Lists the parts that take memory, with their sizes.
impl std::fmt::Display for Memory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let some = self.parts().into_iter().filter(|(_, bytes)| *bytes > 0);
        let parts: Vec<String> = some.map(|(name, bytes)| format!("{name} {}", room::size(bytes))).collect();
        f.write_str(&parts.join(", "))
    }
}

/// Returns the bytes of the optimizer's state for a weight with `len` values: two moments, and a master for a bf16 weight. A card stores
/// only the half of the master that the weight lacks.
fn state_bytes(dtype: ParamDtype, len: u64, plan: &MemoryPlan) -> u64 {
    let is_elsewhere = match plan.of {
        MemoryOf::Card => is_offloaded(plan),
        MemoryOf::BesideCard => !is_offloaded(plan),
        MemoryOf::Host => false,
    };
    if is_elsewhere {
        return 0;
    }
    let moments = plan.optimizer.moment_bytes(len as usize) as u64;
    (moments + master_bytes(dtype, plan) * len).div_ceil(parts_of_state(plan))
}

/// Returns the bytes of the master of a value, or of the half that the weight lacks.
fn master_bytes(dtype: ParamDtype, plan: &MemoryPlan) -> u64 {
    match plan.of {
        _ if dtype != ParamDtype::Bf16 || plan.optimizer.pure_bf16 => 0,
        MemoryOf::Card => 2,
        MemoryOf::Host | MemoryOf::BesideCard => 4,
    }
}

/// Returns the number of ranks among which the optimizer's state is divided.
fn parts_of_state(plan: &MemoryPlan) -> u64 {
    let split = &plan.algorithm.split;
    if split.settings.shard == Shard::None { 1 } else { split.ranks.size() as u64 }
}

/// Returns whether the optimizer's state of a model on a card is in main memory. A state that is cut into parts is there.
fn is_offloaded(plan: &MemoryPlan) -> bool {
    plan.optimizer.offload != Offload::None || parts_of_state(plan) > 1
}

/// Memory that a rank saves during an update, because gradients and weights are cut.
#[derive(Clone, Copy, Debug, Default)]
struct Parts {
    /// Bytes of the weights of other ranks, without the layer that is complete.
    weights: u64,
    /// Bytes of gradients that stay: this rank's part, the largest group of weights that are exchanged together, and the buffers.
    /// `None` if gradients stay complete.
    gradients: Option<u64>,
}

impl Parts {
    fn of(model: &Model, plan: &MemoryPlan) -> Self {
        let split = &plan.algorithm.split;
        let ranks = split.ranks.size() as u64;
        if split.settings.shard < Shard::Gradients || ranks == 1 {
            return Self::default();
        }
        let (mut layers, blocks) = (model.decoder().layers(), model.decoder().block_params());
        if model.decoder().tied() {
            // The head is the embedding.
            layers.pop();
        }
        let cut = |layer: &Vec<Arc<Param>>| -> u64 {
            layer.iter().filter(|param| is_lent(split, param)).map(|param| param.num_bytes() as u64).sum()
        };
        let (all, largest) =
            layers.iter().map(cut).fold((0, 0), |(all, most), own| (all + own, most.max(own)));
        let of_gradients = |params: &[Arc<Param>]| -> u64 {
            params.iter().filter(|param| param.trainable()).map(|param| 4 * param.len() as u64).sum()
        };
        // The gradients of the embedding and of the towers are complete at the end.
        let all_gradients = of_gradients(model.params());
        let of_blocks: Vec<u64> = blocks.iter().map(|block| of_gradients(block)).collect();
        let outside = all_gradients - of_blocks.iter().sum::<u64>();
        let together = of_blocks.into_iter().max().unwrap_or(0).max(outside);
        let leaves = (split.num_leaves() as u64).div_ceil(ranks).max(1);
        let micro_batches = plan.prompts_per_step.div_ceil(plan.algorithm.micro()) as u64;
        // A leaf of several micro-batches has complete gradients until its last one.
        let gradients = (micro_batches <= leaves).then(|| {
            let sums = u64::from(leaves.next_power_of_two().trailing_zeros()) + 1;
            sums * all_gradients / ranks + together + 8 * split.settings.bucket as u64
        });
        Self { weights: (all - all / ranks).saturating_sub(largest), gradients }
    }

    /// Returns the bytes of gradients that are not held.
    fn gradients(&self, seen: &Footprint) -> u64 {
        let all = seen.of(Held::Gradients);
        self.gradients.map_or(0, |held| all.saturating_sub(held))
    }

    fn saved(&self, seen: &Footprint) -> u64 {
        self.weights + self.gradients(seen)
    }
}

/// Computes the memory of a run from a model on [`Device::Outline`]. The model must have its adapters, and its trained weights
/// must be marked ([`Selection::apply`](crate::Selection::apply)).
///
/// # Errors
/// Returns an error if the model is not on [`Device::Outline`], or if the step fails.
pub fn memory(model: &Model, plan: &MemoryPlan) -> Result<Memory> {
    match plan.of {
        MemoryOf::Host => measured(model, plan),
        MemoryOf::BesideCard => Ok(beside_card(model, plan)),
        MemoryOf::Card => {
            on_card(model.decoder().embedding().dtype() == ParamDtype::Bf16, || measured(model, plan))
        }
    }
}

/// Returns the parts that last from the first update to the end.
fn lasting(model: &Model, plan: &MemoryPlan) -> Memory {
    let mut out = Memory::default();
    if let Some(largest) = model.params().iter().filter(|p| p.trainable()).max_by_key(|p| p.len()) {
        let (len, optimizer) = (largest.len().max(1), &plan.optimizer);
        let has_state =
            optimizer.offload != Offload::File && state_bytes(largest.dtype(), len as u64, plan) > 0;
        let each = |bytes: usize| (bytes / len) as u64;
        out.each = BytesEach {
            value: each(largest.num_bytes()),
            gradient: each(optimizer.grad_bytes(largest)),
            moments: if has_state { each(optimizer.moment_bytes(len)) } else { 0 },
            master: if has_state { master_bytes(largest.dtype(), plan) } else { 0 },
        };
    }
    let base = model.base_params().len();
    for (at, param) in model.params().iter().enumerate() {
        let (len, bytes) = (param.len() as u64, param.num_bytes() as u64);
        *(if at < base { &mut out.weights } else { &mut out.adapters }) += bytes;
        if param.trainable() {
            let in_files = plan.optimizer.offload == Offload::File;
            *(if in_files { &mut out.disk } else { &mut out.optimizer }) +=
                state_bytes(param.dtype(), len, plan);
            out.reference += if plan.reference == ReferenceKept::Copied && at < base { bytes } else { 0 };
        }
    }
    match (plan.reference, &plan.own_reference) {
        (ReferenceKept::InPlace, _) => out.reference = model.reference_bytes(),
        (ReferenceKept::Own, Some(own)) => {
            out.reference = own.params().iter().map(|param| param.num_bytes() as u64).sum();
        }
        _ => {}
    }
    out
}

/// Returns the bytes of a teacher's most probable tokens: the id and the log-probability of each for a rollout, and for a stream the
/// log-probabilities and gradients in f64, and their copies in f32.
fn teacher_bytes(model: &Model, plan: &MemoryPlan) -> u64 {
    let Work::Rollout(rows) = &plan.work else { return 0 };
    let algorithm = plan.algorithm;
    let each = (algorithm.num_generations * algorithm.sampling.max_completion_length) as u64;
    let (all, stream) = (each * rows.len() as u64, algorithm.stream_rows() as u64);
    let tokens = algorithm.loss.teacher_tokens().min(model.decoder().config().vocab) as u64;
    tokens * (8 * all + 48 * all.min(stream))
}

/// Returns the main memory beside a card. Gradients that are updated there keep their memory for the next step.
fn beside_card(model: &Model, plan: &MemoryPlan) -> Memory {
    let mut out =
        Memory { media: moving_media(plan), teacher: teacher_bytes(model, plan), ..lasting(model, plan) };
    let [uploads, both] = Card::PINNED_BYTES;
    out.pinned = uploads as u64;
    if is_offloaded(plan) {
        let trained = model.params().iter().filter(|param| param.trainable());
        out.gradients = trained.map(|param| 4 * param.len() as u64).sum();
        out.pinned = both as u64;
    }
    out
}

/// Returns the bytes of the decoded media of two steps, since those of the next step are decoded during a step, or those of an
/// evaluation if they are more. Answers of an environment belong to the current step only.
fn moving_media(plan: &MemoryPlan) -> u64 {
    let of_completion = plan.answers().map_or(0, |(answer, turns)| turns as u64 * media_bytes(answer));
    let of_prompt = plan.algorithm.num_generations as u64 * of_completion;
    let trained = match &plan.work {
        Work::None => 0,
        Work::Rollout(rows) => rows.iter().map(|row| 2 * media_bytes(&row.prompt) + of_prompt).sum(),
        Work::Examples(examples) => {
            examples.iter().map(|example| 2 * media_bytes(&example.prompt)).sum::<u64>()
        }
    };
    let evaluated = plan.evaluation.iter().flat_map(|(prompts, _)| prompts);
    trained.max(evaluated.map(|prompt| media_bytes(prompt)).sum())
}

fn measured(model: &Model, plan: &MemoryPlan) -> Result<Memory> {
    if model.device() != Device::Outline {
        let device = model.device().to_string();
        return Err(TrainError::setting(DEVICE, &device, "expected Device::Outline".into()));
    }
    for param in model.params() {
        plan.optimizer.place_grad(param);
    }
    let mut out = lasting(model, plan);
    let parts = Parts::of(model, plan);
    let whole = out.weights;
    let mut most = Footprint::default();
    let mut most_held = 0;
    let mut take = |phase: Phase, seen: Footprint| {
        // The update begins after the caches are dropped.
        let cache = if phase == Phase::Update { 0 } else { seen.of(Held::Cache) };
        let saved = if phase == Phase::Update { parts.saved(&seen) } else { 0 };
        let held = whole + seen.passes() - saved + if plan.of == MemoryOf::Card { cache } else { 0 };
        let longest = out.cache.max(seen.of(Held::Cache));
        if held > most_held {
            (most, most_held, out.peak) = (seen, held, phase);
            out.cache = cache;
        }
        if plan.of == MemoryOf::Host {
            out.cache = longest;
        }
    };
    match &plan.work {
        Work::None => {}
        Work::Rollout(rows) => {
            let (done, seen) = footprint(|| reinforce(model, plan, rows, &mut take));
            done?;
            take(Phase::Update, seen);
        }
        Work::Examples(examples) => {
            let (done, seen) = footprint(|| imitated(model, plan, examples));
            done?;
            take(Phase::Update, seen);
        }
    }
    if plan.evaluation.is_some() {
        let (done, seen) = footprint(|| evaluate(model, plan));
        done?;
        take(Phase::Evaluation, seen);
    }
    out.gradients = most.of(Held::Gradients);
    if out.peak == Phase::Update {
        out.weights -= parts.weights;
        out.gradients -= parts.gradients(&most);
    }
    out.features = most.of(Held::Features);
    out.activations = most.of(Held::Activations);
    out.recorded = most.of(Held::Recorded);
    out.workspace = if plan.of == MemoryOf::Card { Card::OWN_BYTES as u64 } else { 0 };
    if plan.of == MemoryOf::Host {
        (out.media, out.teacher) = (moving_media(plan), teacher_bytes(model, plan));
    }
    Ok(out)
}

/// Returns the bytes of a prompt's decoded media.
pub fn media_bytes(prompt: &Prompt) -> u64 {
    prompt.media.iter().map(|medium| 4 * medium.data.len() as u64).sum()
}

/// Runs a supervised update.
pub(crate) fn imitated(model: &Model, plan: &MemoryPlan, examples: &[SftExample]) -> Result<()> {
    let mut optimizer = AdamW::new(plan.optimizer.clone(), model.params());
    let at = UpdateAt { step: 0, learning_rate_factor: 1.0 };
    let mut timer = PhaseTimer::start(Instant::now());
    let algorithm = alone(plan.algorithm);
    let examples: Vec<StepExample<'_>> = examples.iter().map(StepExample::from).collect();
    imitate((model, None), &mut optimizer, at, &algorithm, (Ok(()), &examples), &mut timer).map(drop)
}

/// Returns the algorithm for an outline, which this process alone runs.
fn alone(algorithm: &Divided) -> Divided {
    Algorithm { split: Division::default(), ..algorithm.algorithm.clone() }.into()
}

/// Completes the prompts of an evaluation.
pub(crate) fn evaluate(model: &Model, plan: &MemoryPlan) -> Result<()> {
    let Some((prompts, num_generations)) = &plan.evaluation else { return Ok(()) };
    let encode = |prompt: &Arc<Prompt>| Ok(model.encode_prompt(prompt)?);
    let features = phase("encode", || {
        holding(Held::Features, || prompts.iter().map(encode).collect::<Result<Vec<_>>>())
    })?;
    let pairs: Vec<_> = prompts.iter().map(|prompt| &**prompt).zip(&features).collect();
    // Evaluations decode as many completions at once as by default.
    let algorithm =
        Algorithm { max_live: plan.algorithm.max_live.min(MAX_LIVE), ..plan.algorithm.algorithm.clone() };
    complete(model, &algorithm, &pairs, *num_generations)
}

/// Runs a rollout and its updates. `take` receives the footprint of the rollout. The caller measures the rest.
pub(crate) fn reinforce(
    model: &Model,
    plan: &MemoryPlan,
    rows: &[PreparedRow],
    take: &mut impl FnMut(Phase, Footprint),
) -> Result<()> {
    let algorithm = &alone(plan.algorithm);
    let size = algorithm.num_generations;
    let teaches_itself = plan.reference == ReferenceKept::Policy;
    let start = match &plan.own_reference {
        None if algorithm.loss.needs_reference() && !teaches_itself => {
            Some(model.reference(ReferencePlace::Memory(model.device()))?)
        }
        _ => None,
    };
    let reference = plan.own_reference.as_deref().or(start.as_ref()).or(teaches_itself.then_some(model));
    let mut optimizer = AdamW::new(plan.optimizer.clone(), model.params());
    let prompts = || rows.iter().map(|row| &*row.prompt);
    let (encoded, seen) = footprint(|| {
        let (features, memories) = phase("encode", || {
            holding(Held::Features, || features::encode(model, Keep::for_update(algorithm), prompts()))
        })?;
        let pairs: Vec<_> = prompts().zip(&features).collect();
        complete(model, algorithm, &pairs, size)?;
        Ok::<_, TrainError>((features, memories))
    });
    let (features, memories) = encoded?;
    take(Phase::Rollout, seen);
    let group = |(row, features): (&PreparedRow, Vec<Features>)| outlined(model, plan, row, features);
    let groups = phase("rollout", || rows.iter().zip(features).map(group).collect::<Result<Vec<_>>>())?;
    // The rewards differ within every group, so that every group has nonzero advantages.
    let total: Vec<Option<f64>> = (0..rows.len() * size).map(|i| Some((i % size) as f64)).collect();
    let rewards = RewardMatrix {
        names: vec!["reward".into()],
        values: vec![total.clone()],
        weights: vec![1.0],
        total,
        logged: Logged::default(),
    };
    let kept = vec![Kept { groups: 0..rows.len(), memories, recalled: None }];
    let mut parts = Rollouts::new(algorithm, groups, kept, rewards)?.split(plan.prompts_per_step);
    for part in &mut parts {
        part.gate(&algorithm.loss)?;
        part.choose(&algorithm.loss, algorithm.seed, 0)?;
        let mut timer = PhaseTimer::start(Instant::now());
        let at = UpdateAt { step: 0, learning_rate_factor: 1.0 };
        update((model, reference), &mut optimizer, at, algorithm, part, &mut timer)?;
    }
    Ok(())
}

/// Returns the longest completions of a row. Each has the largest answers of an environment, whose media are encoded.
fn outlined(
    model: &Model,
    plan: &MemoryPlan,
    row: &PreparedRow,
    mut features: Vec<Features>,
) -> Result<Group> {
    let (size, longest) = (plan.algorithm.num_generations, plan.algorithm.sampling.max_completion_length);
    let mut row = row.clone();
    let mut completions = Vec::with_capacity(size);
    for _ in 0..size {
        let mut completion = Completion::recorded(vec![0; longest], FinishReason::Stop, String::new());
        let answers =
            plan.answers().into_iter().flat_map(|(answer, turns)| (0..turns).map(move |at| (at, answer)));
        for (at, answer) in answers {
            let start = 1 + at * (answer.ids.len() + 1);
            completion.ids[start..start + answer.ids.len()].copy_from_slice(&answer.ids);
            let first = row.prompt.media.len();
            for medium in &answer.media {
                features.push(holding(Held::Features, || model.encode(medium, &answer.instruction))?);
            }
            row.add_media(answer.media.iter().cloned());
            completion.turns.push(AddedTurn {
                start,
                turn: Arc::clone(answer),
                media: (first..first + answer.media.len()).collect(),
                sources: Vec::new(),
                said: Turn { role: Role::Tool, parts: Vec::new() },
            });
        }
        let numbers = vec![0.0; completion.num_sampled()];
        completion.logprobs.clone_from(&numbers);
        completion.sampler_logprobs.clone_from(&numbers);
        completion.entropies = numbers;
        completions.push(Scored::new(completion, None));
    }
    Ok(Group { row, features, completions })
}

/// Completes prompts: a prefill for each prompt, then one decoding step for all completions in flight. The step stands for all
/// decoding steps, so the completions have half their length in it.
fn complete(
    model: &Model,
    algorithm: &Algorithm,
    prompts: &[(&Prompt, &Vec<Features>)],
    size: usize,
) -> Result<()> {
    phase("rollout", || completed(model, algorithm, prompts, size))
}

fn completed(
    model: &Model,
    algorithm: &Algorithm,
    prompts: &[(&Prompt, &Vec<Features>)],
    size: usize,
) -> Result<()> {
    let (decoder, pass) = (model.decoder(), model.pass());
    let slots = algorithm.sampling.max_completion_length.saturating_sub(1);
    for prompts in prompts.chunks((algorithm.max_live / size.max(1)).max(1)) {
        let mut caches = Vec::with_capacity(prompts.len());
        for (prompt, features) in prompts {
            let mut cache = decoder.cache(prompt.ids.len(), size, slots, &pass)?;
            let x = model.embed_prompt(prompt, features)?;
            let hidden =
                decoder.prefill(x, &decoder.rope_table(&prompt.positions), &mut cache, &pass, None)?;
            decoder.logits(&hidden)?;
            (0..slots / 2).for_each(|_| cache.advance(&(0..size).collect::<Vec<_>>()));
            caches.push(cache);
        }
        if slots == 0 {
            continue;
        }
        let flying = prompts.len() * size;
        // Decodes a token of the first completions.
        let mut step = |flying: usize| {
            let slots = |at: usize| (0..flying.saturating_sub(at * size).min(size)).collect();
            let rows = caches.iter_mut().enumerate();
            let rows = rows.map(|(at, cache)| DecodeRows { cache, slots: slots(at) });
            let mut rows = DecodeBatch::new(rows.collect());
            let x = decoder.embed(&vec![0; flying], &pass)?;
            let rope = decoder.rope_table(&vec![[0; 3]; flying]);
            let hidden = decoder.decode(x, &rope, &mut rows, &pass, None)?;
            for first in (0..flying).step_by(pass.device.logit_rows()) {
                let some = first..flying.min(first + pass.device.logit_rows());
                let from = vec![DrawFrom { seen: [&[], &[]], forbids: false, uniform: 0.0 }; some.len()];
                decoder.logits(&hidden.row_range(some)?)?.draw(&Sampler::default(), &from)?;
            }
            Ok::<_, TrainError>(())
        };
        match is_on_card() {
            false => repeated(slots as f64, || step(flying))?,
            // A card records a step for each of a few batch sizes, as completions end.
            true => in_arena(|| {
                let smaller = |&rows: &usize| match rows {
                    16..=64 => Some(rows / 2),
                    65.. => Some((rows - 1) / 64 * 64),
                    _ => None,
                };
                // Each step adds a token.
                std::iter::successors(Some(flying), smaller).take(slots - slots / 2).try_for_each(&mut step)
            })?,
        }
    }
    Ok(())
}
