//! Rates of a machine and the work of a step.
//!
//! Two rates of the machine are measured with all threads. One is the rate of matrix products in the shapes of the model (three
//! per layer: output, input gradient, weight gradient). The other is the rate of reading memory.
//!
//! - Useful operations are those of linear layers, attention pairs, the head and their gradients. A multiply-add counts as two.
//!   Recomputation does not count. The forward pass of a tower counts for the rollout and for the reference. For the policy it
//!   counts only if the rollout did not keep its results. The decoder's forward pass for the policy counts unless it is taken
//!   from the rollout.
//! - A decoded token must read the decoder's weights once, and every key and value that it attends to once (a prompt once per
//!   group). At the rate of reading memory, this gives the minimum time of decoding.

use std::hint::black_box;
use std::time::Instant;

use omnigrpo_kernels::profile::{Op, Profile};
use omnigrpo_kernels::{Mat, MatMut, linear, memory};
use omnigrpo_models::Model;
use omnigrpo_ops::Part;

/// Operations that count as useful.
const USEFUL: &[Op] = &[Op::Linear, Op::LinearRows, Op::Attention, Op::AttentionDecode, Op::Head];

/// Returns the useful floating-point operations of a phase, without those of backward passes.
pub fn useful_flops(profile: &Profile, phase: &str) -> f64 {
    flops(profile, phase, USEFUL)
}

fn flops(profile: &Profile, phase: &str, ops: &[Op]) -> f64 {
    let of_phase = profile.entries.iter().filter(|e| e.phase == phase && ops.contains(&e.op));
    of_phase.map(|e| e.total.flops).sum::<u64>() as f64
}

/// Returns the seconds of a phase.
pub fn secs(profile: &Profile, phase: &str) -> f64 {
    let of_phase = profile.phases.iter().filter(|own| own.name == phase);
    of_phase.map(|own| own.time.as_secs_f64()).sum()
}

/// Useful operations of backward passes.
const GRADIENTS: &[Op] = &[Op::LinearInput, Op::LinearWeight, Op::AttentionBackward, Op::HeadBackward];

/// Returns the useful floating-point operations of the policy's forward and backward pass. Forward results that were kept from
/// the rollout do not count.
pub fn policy_flops(step: &Profile) -> f64 {
    let forward = |phase: &str| flops(step, phase, &[Op::Linear, Op::Attention]);
    let again = (forward("backward") / forward("encode").max(1.0)).min(1.0);
    useful_flops(step, "forward") + flops(step, "backward", GRADIENTS) + again * useful_flops(step, "encode")
}

/// Sizes of a rollout whose prompts all have the same length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RolloutShape {
    /// Tokens per prompt, including those of media.
    pub prompt_tokens: usize,
    /// Number of prompts.
    pub num_prompts: usize,
    /// Completions per prompt.
    pub num_generations: usize,
    /// Tokens per completion, at least 1.
    pub completion_tokens: usize,
}

/// Returns the number of bytes that decoding has to read: for each token the decoder's weights and the keys and values. Keys and
/// values of a prompt are read once per group.
pub fn decode_bytes(model: &Model, rollout: RolloutShape) -> f64 {
    let RolloutShape { prompt_tokens, num_prompts, num_generations, completion_tokens } = rollout;
    let decoder = model.decoder();
    let config = decoder.config();
    let llm = model.params().iter().filter(|p| p.part() == Part::Llm);
    let mut weights: usize = llm.map(|p| p.num_bytes()).sum();
    if !decoder.tied() {
        // A token reads only one row of the embedding.
        weights -= decoder.embedding().num_bytes();
    }
    let row = 2 * config.heads.kv_width() * size_of::<f32>() * config.layers;
    let tokens = completion_tokens.saturating_sub(1);
    // Token t attends to t decoded tokens, including itself.
    let own: usize = (1..=tokens).sum();
    (tokens * weights + num_prompts * row * (tokens * prompt_tokens + num_generations * own)) as f64
}

/// Measures the floating-point operations per second of the decoder's matrix products with `rows` rows.
pub fn gemm_rate(model: &Model, rows: usize) -> f64 {
    let llm = model.params().iter().filter(|p| p.part() == Part::Llm);
    let layers = llm.filter(|p| p.name().contains(".layers."));
    // For each shape, the first weight and the number of weights with this shape.
    let mut shapes = Vec::new();
    for param in layers {
        if let [n, k] = *param.shape() {
            match shapes.iter_mut().find(|(_, have, _)| *have == [n, k]) {
                Some((_, _, count)) => *count += 1,
                None => shapes.push((param, [n, k], 1)),
            }
        }
    }
    let (mut flops, mut secs) = (0.0, 0.0);
    for (param, [n, k], count) in shapes {
        let fill = |len: usize| (0..len).map(|i| (i % 13) as f32 * 0.01 - 0.06).collect::<Vec<f32>>();
        let (x, dy) = (fill(rows * k), fill(rows * n));
        let (mut y, mut dx, mut dw) = (vec![0.0; rows * n], vec![0.0; rows * k], vec![0.0; n * k]);
        let (x, dy) = (Mat::new(&x, rows, k), Mat::new(&dy, rows, n));
        let guard = param.read();
        let layer = [linear::Layer::new(guard.weight(n, k))];
        let rounding = layer[0].w.rounding();
        let mut time = typical(3, || linear::forward_into(x, &layer, false, MatMut::new(&mut y, rows, n)))
            + typical(3, || linear::backward_input_into(dy, &layer, false, MatMut::new(&mut dx, rows, k)));
        time += typical(3, || {
            let gradient = linear::Gradient { dw: MatMut::new(&mut dw, n, k), col: 0, rounding };
            linear::backward_weight(dy, x, &mut [gradient]);
        });
        black_box((&y, &dx, &dw));
        flops += count as f64 * 6.0 * (rows * n * k) as f64;
        secs += count as f64 * time;
    }
    flops / secs.max(f64::MIN_POSITIVE)
}

/// Measures the bytes per second that all threads together read from memory.
pub fn memory_rate() -> f64 {
    let data = vec![1.0; memory::BEYOND_CACHES / size_of::<f32>()];
    let secs = typical(3, || {
        black_box(memory::read(&data));
    });
    memory::BEYOND_CACHES as f64 / secs
}

/// Returns the median seconds of `runs` calls. A first call, which touches the memory, is not counted.
fn typical(runs: usize, mut f: impl FnMut()) -> f64 {
    f();
    let time = |f: &mut dyn FnMut()| {
        let started = Instant::now();
        f();
        started.elapsed().as_secs_f64()
    };
    median((0..runs).map(|_| time(&mut f)).collect())
}

/// Returns the median. For an even number of values it is the mean of the middle two, for none it is NaN.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => f64::NAN,
        n => (values[(n - 1) / 2] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use omnigrpo_kernels::profile::{Entry, Phase, Total};
    use omnigrpo_models::{Checkpoint, LoadOptions};

    use super::*;

    fn phase(name: &'static str, millis: u64) -> Phase {
        Phase { name, time: Duration::from_millis(millis), helped: Duration::ZERO }
    }

    #[test]
    fn a_policy_pass_counts_what_was_not_kept_of_the_tower() {
        let entry = |phase, op, flops| Entry { phase, op, total: Total { flops, ..Total::default() } };
        let mut profile = Profile {
            phases: vec![phase("forward", 1500), phase("encode", 1000)],
            entries: vec![
                entry("forward", Op::Linear, 100),
                entry("forward", Op::Head, 20),
                entry("forward", Op::Sampler, 7),
                entry("encode", Op::Attention, 10),
            ],
        };
        assert_eq!((useful_flops(&profile, "forward"), secs(&profile, "forward")), (120.0, 1.5));
        // The rollout kept all results of the tower, so only its backward pass runs.
        profile.entries.push(entry("backward", Op::LinearInput, 110));
        profile.entries.push(entry("backward", Op::LinearWeight, 130));
        assert_eq!(policy_flops(&profile), 120.0 + 240.0);
        // The backward pass recomputes half of the tower's results.
        profile.entries.push(entry("backward", Op::Linear, 5));
        assert_eq!(policy_flops(&profile), 120.0 + 240.0 + 0.5 * 10.0);
    }

    #[test]
    fn decoding_reads_weights_per_token_and_prompts_per_group() {
        let golden =
            concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/checkpoints/qwen2_vl_untied");
        let checkpoint = Checkpoint::open(golden.as_ref()).unwrap();
        let model = Model::load(&checkpoint, &LoadOptions::default()).unwrap();
        let bytes = |prompt_tokens, num_prompts, num_generations, completion_tokens| {
            decode_bytes(
                &model,
                RolloutShape { prompt_tokens, num_prompts, num_generations, completion_tokens },
            )
        };
        assert_eq!(bytes(10, 2, 3, 1), 0.0, "the first token comes with the prompt");
        let config = model.decoder().config();
        let row = (2 * config.heads.kv_width() * 4 * config.layers) as f64;
        let weights = bytes(0, 0, 0, 2);
        let llm =
            model.params().iter().filter(|p| p.part() == Part::Llm && !p.name().contains("embed_tokens"));
        assert_eq!(weights, llm.map(|p| p.num_bytes()).sum::<usize>() as f64);
        // Three tokens after the first attend to 1, 2 and 3 decoded tokens.
        assert_eq!(bytes(10, 2, 3, 4), 3.0 * weights + 2.0 * row * (3.0 * 10.0 + 3.0 * 6.0));
        assert!(gemm_rate(&model, 8) > 0.0);
    }

    #[test]
    fn a_median_is_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(Vec::new()).is_nan());
    }
}
