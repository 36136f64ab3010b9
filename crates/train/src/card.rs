//! Predicted time of a step on a card that is not measured, from its rates.
//!
//! The prediction counts the products, the attention and the bytes of a step. A pass over many tokens reaches [`PASS_SHARE`] of the card's
//! rate for products, and decoding [`MEMORY_SHARE`] of the rate of its memory. Both shares were measured on one H100
//! (docs/gpu-h100.md), so times of other cards are estimates.

use omnigrpo_models::{Model, Prompt};
use omnigrpo_ops::{DeltaHeads, Rates};

use crate::forecast::StepTime;
use crate::memory::{MemoryPlan, ReferenceKept, Work};

/// Share of the rate for products that a pass over many tokens reaches.
const PASS_SHARE: f64 = 0.5;
/// Share of the rate of the memory that decoding reaches.
const MEMORY_SHARE: f64 = 0.4;
/// Rows of a tower for each feature that it gives to the decoder: a merger joins 2 × 2 patches.
const PATCHES: f64 = 4.0;
/// Bytes that an update of AdamW moves for each number: gradient, moments and master are read, and all but the gradient are written.
const UPDATE_BYTES: f64 = 28.0;

/// Rates of a card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CardRates {
    /// Floating-point operations per second, in products of bf16 without sparsity.
    pub flops: f64,
    /// Bytes per second of its memory.
    pub bytes: f64,
}

/// Source of the times of operations.
#[derive(Debug)]
pub enum Speed {
    /// Times of operations on this machine's CPU, which are measured when they are first needed.
    Measured(Rates),
    /// Rates of a card.
    Card(CardRates),
}

/// Sizes of a model that determine the time of a pass.
struct Sizes {
    /// Weights that a token is multiplied with, without the head.
    active: f64,
    /// Share of these weights that are trained.
    trained: f64,
    head: f64,
    /// Bytes of the weights that a step of decoding reads.
    decode_bytes: f64,
    /// Width of all queries and of all keys, over all layers that attend.
    queries: f64,
    keys: f64,
    /// Operations of a token in the gated delta rule, over all layers that have it.
    delta: f64,
    /// Bytes of the states of a sequence in these layers.
    states: f64,
    tower: f64,
    trains_tower: bool,
    num_trained: f64,
}

impl Sizes {
    fn of(model: &Model) -> Self {
        let (decoder, config) = (model.decoder(), model.decoder().config());
        let layers = decoder.layers();
        let blocks: Vec<_> = layers.iter().take(config.layers).flatten().collect();
        let matrices = blocks.iter().filter(|param| param.shape().len() > 1);
        let (mut all, mut trained) = (0.0, 0.0);
        for param in matrices {
            all += param.len() as f64;
            trained += if param.trainable() { param.len() as f64 } else { 0.0 };
        }
        let idle = config.experts.map_or(0.0, |experts| {
            let one = (3 * config.hidden * experts.intermediate * config.layers) as f64;
            one * experts.count.saturating_sub(experts.topk) as f64
        });
        let deltas = (0..config.layers).filter(|&l| config.is_delta(l)).count();
        let [mut delta, mut states] = [0.0; 2];
        if let Some(own) = &config.delta {
            let DeltaHeads { value, key_dim, value_dim, .. } = own.heads;
            // Eight products of each chunk of 64 rows; tensor cores multiply the parts of a factor in three products.
            let each = 3 * key_dim * value_dim + 64 * (3 * key_dim + 2 * value_dim);
            delta = (2 * 3 * deltas * value * each) as f64;
            let inputs = (own.taps - 1) * own.heads.packed_width();
            states = (4 * deltas * (inputs + own.heads.state_len())) as f64;
        }
        let attending = config.layers - deltas;
        let of_decoder = |param: &_| layers.iter().flatten().any(|own| std::sync::Arc::ptr_eq(own, param));
        let tower: Vec<_> = model.base_params().iter().filter(|param| !of_decoder(param)).collect();
        let head = (config.hidden * config.vocab) as f64;
        let head_bytes =
            layers.last().map_or(0.0, |last| last.iter().map(|own| own.num_bytes() as f64).sum());
        let block_bytes: f64 = blocks.iter().map(|param| param.num_bytes() as f64).sum();
        Self {
            active: (all - idle).max(0.0),
            trained: if all > 0.0 { trained / all } else { 0.0 },
            head,
            decode_bytes: head_bytes + block_bytes,
            queries: (config.heads.q_width() * attending) as f64,
            keys: (2 * config.heads.kv_width() * attending) as f64,
            delta,
            states,
            tower: tower.iter().map(|param| param.len() as f64).sum(),
            trains_tower: tower.iter().any(|param| param.trainable()),
            num_trained: model
                .params()
                .iter()
                .filter(|param| param.trainable())
                .map(|param| param.len() as f64)
                .sum(),
        }
    }

    /// Returns the operations of a forward pass: of the blocks over tokens that see a mean number of keys, and of the head.
    fn pass(&self, tokens: f64, keys: f64, scored: f64) -> f64 {
        (2.0 * self.active + self.delta) * tokens
            + 4.0 * self.queries * tokens * keys
            + 2.0 * self.head * scored
    }
}

/// Prompts of a rollout, with as many completions each.
struct Rollout<'a> {
    prompts: Vec<&'a Prompt>,
    completions: f64,
    tokens: f64,
}

impl Rollout<'_> {
    fn prompt_tokens(&self) -> f64 {
        self.prompts.iter().map(|prompt| prompt.ids.len() as f64).sum()
    }

    fn features(&self) -> f64 {
        let spans = self.prompts.iter().flat_map(|prompt| &prompt.spans);
        spans.map(|span| span.len as f64).sum()
    }

    /// Number of prompts times that of their completions.
    fn sequences(&self) -> f64 {
        self.prompts.len() as f64 * self.completions
    }

    /// Returns the operations of a pass over all prompts and completions.
    fn pass(&self, sizes: &Sizes) -> f64 {
        let (prompts, own) = (self.prompt_tokens(), self.sequences() * self.tokens);
        let mean = prompts / (self.prompts.len() as f64).max(1.0);
        sizes.pass(prompts, mean / 2.0, 0.0) + sizes.pass(own, mean + self.tokens / 2.0, own)
    }

    /// Returns the seconds in which a model completes the prompts.
    fn seconds(&self, sizes: &Sizes, rates: CardRates) -> f64 {
        let prompts = self.prompt_tokens();
        let prefill = sizes.pass(prompts, prompts / (2.0 * self.prompts.len() as f64).max(1.0), 0.0);
        // The cache has two bytes for each number.
        let cache = 2.0 * sizes.keys * (prompts + self.sequences() * self.tokens / 2.0);
        // A step reads the states and writes them.
        let states = 2.0 * sizes.states * self.sequences();
        let token = (sizes.decode_bytes + cache + states) / (MEMORY_SHARE * rates.bytes)
            + 2.0 * (sizes.active + sizes.head) * self.sequences() / (PASS_SHARE * rates.flops);
        prefill / (PASS_SHARE * rates.flops) + self.tokens * token
    }
}

/// Returns the mean time of an optimizer step over `plans` on a card with these rates. Each plan has the rows of one rollout or
/// supervised update.
pub(crate) fn step_time_on(
    rates: CardRates,
    model: &Model,
    plans: &[MemoryPlan<'_>],
    num_iterations: usize,
) -> StepTime {
    let sizes = Sizes::of(model);
    let of_products = |flops: f64| flops / (PASS_SHARE * rates.flops);
    let update = sizes.num_trained * UPDATE_BYTES / rates.bytes;
    let (mut encode, mut rollout, mut reference, mut forward, mut backward) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for plan in plans {
        let (pass, features, updates, passes) = match &plan.work {
            Work::None => continue,
            Work::Rollout(rows) => {
                let sampling = &plan.algorithm.sampling;
                let of = |prompts: Vec<_>| Rollout {
                    prompts,
                    completions: plan.algorithm.num_generations as f64,
                    tokens: sampling.max_completion_length as f64,
                };
                let own = of(rows.iter().map(|row| &*row.prompt).collect());
                let updates = rows.len().div_ceil(plan.prompts_per_step.max(1)) * num_iterations;
                let (updates, passes) = (updates.max(1) as f64, num_iterations as f64);
                rollout += own.seconds(&sizes, rates) / updates;
                let pass = own.pass(&sizes);
                if plan.reference != ReferenceKept::No {
                    let read = rows.iter().map(|row| row.teacher.as_deref().unwrap_or(&row.prompt));
                    reference += of_products(of(read.collect()).pass(&sizes)) / updates;
                }
                (pass, own.features(), updates, passes)
            }
            Work::Examples(examples) => {
                let prompts: Vec<_> = examples.iter().map(|own| &own.prompt).collect();
                let tokens: usize = examples.iter().map(|own| own.num_imitated()).sum();
                let each = tokens as f64 / (examples.len() as f64).max(1.0);
                let own = Rollout { prompts, completions: 1.0, tokens: each };
                (own.pass(&sizes), own.features(), 1.0, 1.0)
            }
        };
        let tower = 2.0 * sizes.tower * PATCHES * features;
        encode += of_products(tower) / updates;
        forward += of_products(pass) * passes / updates;
        // One product for the input's gradient, one for that of each trained weight, and a second forward pass where blocks are
        // computed again.
        let again = f64::from(u8::from(plan.algorithm.recompute));
        let of_tower = if sizes.trains_tower { 2.0 * tower } else { 0.0 };
        backward += of_products((1.0 + sizes.trained + again) * pass + of_tower) * passes / updates;
    }
    let evaluation = plans.first().and_then(|plan| Some((plan, plan.evaluation.as_ref()?)));
    let evaluation = evaluation.map_or(0.0, |(plan, (prompts, completions))| {
        let own = Rollout {
            prompts: prompts.iter().map(|prompt| &**prompt).collect(),
            completions: *completions as f64,
            tokens: plan.algorithm.sampling.max_completion_length as f64,
        };
        own.seconds(&sizes, rates) + of_products(2.0 * sizes.tower * PATCHES * own.features())
    });
    let each = 1.0 / plans.len().max(1) as f64;
    StepTime {
        phases: vec![
            ("encode", encode * each),
            ("rollout", rollout * each),
            ("reference", reference * each),
            ("forward", forward * each),
            ("backward", backward * each),
            ("optimizer", update),
        ],
        evaluation,
    }
}
