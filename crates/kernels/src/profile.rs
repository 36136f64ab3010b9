//! Counters of time, floating-point operations and bytes, by phase and kernel.
//!
//! Counting is off by default; a kernel then only reads one flag. If it is on, each call of a public kernel adds its wall time on
//! the calling thread, its useful operations, and the bytes that it reads and writes at least once. A multiply-add counts as two
//! operations; recomputation does not count.
//!
//! A kernel that another kernel calls counts only as part of the outer kernel. The times of the kernels in a phase therefore add
//! up to at most the time of the phase. The counters are global to the process.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::linear::Layer;
use crate::{Stored, Weight, team};

/// A kind of work, in the order of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Forward pass of linear layers for many rows.
    Linear,
    /// Forward pass of linear layers for few rows (decoding).
    LinearRows,
    /// Gradients of linear layers with respect to their inputs.
    LinearInput,
    /// Gradients of linear layers with respect to weights and biases.
    LinearWeight,
    /// Forward pass of attention.
    Attention,
    /// Attention over a cache (decoding).
    AttentionDecode,
    /// Gradients of attention.
    AttentionBackward,
    /// Forward pass of the gated delta rule.
    Delta,
    /// The gated delta rule, row by row (decoding).
    DeltaDecode,
    /// Gradients of the gated delta rule.
    DeltaBackward,
    /// Causal convolution, forward and backward.
    CausalConv,
    /// Normalisation, forward and backward.
    Norm,
    /// Rotary position embedding, forward and backward.
    Rope,
    /// Activations and gated products, forward and backward.
    Activation,
    /// Log-probabilities and entropies, or logits, of the output head.
    Head,
    /// Gradients of the output head.
    HeadBackward,
    /// Lookup of embedding rows, forward and backward.
    Embedding,
    /// Gradient norm and weight update.
    Optimizer,
    /// Drawing tokens.
    Sampler,
}

impl Op {
    /// Returns the name used in tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::LinearRows => "linear, decode",
            Self::LinearInput => "linear, dx",
            Self::LinearWeight => "linear, dw",
            Self::Attention => "attention",
            Self::AttentionDecode => "attention, decode",
            Self::AttentionBackward => "attention, backward",
            Self::Delta => "delta rule",
            Self::DeltaDecode => "delta rule, decode",
            Self::DeltaBackward => "delta rule, backward",
            Self::CausalConv => "causal convolution",
            Self::Norm => "norm",
            Self::Rope => "rope",
            Self::Activation => "activation",
            Self::Head => "head",
            Self::HeadBackward => "head, backward",
            Self::Embedding => "embedding",
            Self::Optimizer => "optimizer",
            Self::Sampler => "sampler",
        }
    }
}

/// Totals of one kind of work in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    pub calls: u64,
    pub time: Duration,
    /// Useful floating-point operations.
    pub flops: u64,
    /// Bytes read or written; each operand counts once per call.
    pub bytes: u64,
}

/// A line of the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Name of the phase, or `""` for work before the first phase.
    pub phase: &'static str,
    /// Kind of work.
    pub op: Op,
    pub total: Total,
}

static ON: AtomicBool = AtomicBool::new(false);
static STATE: Mutex<State> = Mutex::new(State {
    phase: "",
    since: None,
    helped: Duration::ZERO,
    phases: Vec::new(),
    entries: Vec::new(),
});

struct State {
    phase: &'static str,
    since: Option<Instant>,
    /// Value of [`team::helped`] when the phase last changed.
    helped: Duration,
    phases: Vec<Phase>,
    entries: Vec<Entry>,
}

impl State {
    /// Adds the time since the phase last changed to the active phase.
    fn settle(&mut self, now: Instant) {
        if let Some(since) = self.since.replace(now) {
            let now_helped = team::helped();
            let time = now.saturating_duration_since(since);
            let helped = now_helped.saturating_sub(std::mem::replace(&mut self.helped, now_helped));
            match self.phases.iter_mut().find(|phase| phase.name == self.phase) {
                Some(phase) => (phase.time, phase.helped) = (phase.time + time, phase.helped + helped),
                None => self.phases.push(Phase { name: self.phase, time, helped }),
            }
        }
    }
}

/// Time spent in a phase, without the phases inside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Name of the phase, or `""` for time outside of all phases.
    pub name: &'static str,
    pub time: Duration,
    /// Time that helper threads spent working in kernels, summed over the threads.
    pub helped: Duration,
}

impl Phase {
    /// Returns the average number of working threads, including the calling thread.
    #[must_use]
    pub fn threads(&self) -> f64 {
        1.0 + self.helped.as_secs_f64() / self.time.as_secs_f64().max(f64::MIN_POSITIVE)
    }
}

/// The result of [`take`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Profile {
    /// Phases in order of first use.
    pub phases: Vec<Phase>,
    /// Entries in the order of the phases, then by kind of work.
    pub entries: Vec<Entry>,
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

pub fn enable(on: bool) {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    (state.since, state.helped) = (on.then(Instant::now), team::helped());
    drop(state);
    ON.store(on, Ordering::Relaxed);
}

/// Returns true if counting is on.
#[must_use]
pub fn enabled() -> bool {
    ON.load(Ordering::Relaxed)
}

/// Assigns subsequent work to `phase`. Returns the previous phase, which the caller must restore afterwards.
pub fn enter(phase: &'static str) -> &'static str {
    if !enabled() {
        return "";
    }
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.settle(Instant::now());
    std::mem::replace(&mut state.phase, phase)
}

/// Returns everything that was counted since the last call, and resets the counters.
#[must_use]
pub fn take() -> Profile {
    let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    state.settle(Instant::now());
    let (phases, mut entries) = (std::mem::take(&mut state.phases), std::mem::take(&mut state.entries));
    entries.sort_by_key(|e| (phases.iter().position(|phase| phase.name == e.phase), e.op));
    Profile { phases, entries }
}

/// Guard that counts from its creation until it is dropped; see [`span`].
#[must_use]
pub struct Span(Option<(Op, Instant, u64, u64)>);

/// Counts work of one kind until the result is dropped. `flops` and `bytes` are evaluated only if counting is on.
#[inline]
pub fn span(op: Op, work: impl FnOnce() -> (usize, usize)) -> Span {
    if !enabled() || INSIDE.replace(true) {
        return Span(None);
    }
    let (flops, bytes) = work();
    Span(Some((op, Instant::now(), flops as u64, bytes as u64)))
}

/// Guard that marks this thread as a helper until it is dropped. Kernels on this thread count as part of the kernel of the
/// calling thread.
#[must_use]
pub(crate) struct Inside(bool);

pub(crate) fn inside() -> Inside {
    Inside(INSIDE.replace(true))
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let Some((op, started, flops, bytes)) = self.0 else { return };
        let time = started.elapsed();
        INSIDE.set(false);
        let mut state = STATE.lock().unwrap_or_else(PoisonError::into_inner);
        let phase = state.phase;
        let at = state.entries.iter().position(|e| e.phase == phase && e.op == op).unwrap_or_else(|| {
            state.entries.push(Entry { phase, op, total: Total::default() });
            state.entries.len() - 1
        });
        let total = &mut state.entries[at].total;
        total.calls += 1;
        total.time += time;
        total.flops += flops;
        total.bytes += bytes;
    }
}

/// Returns the operations and bytes of a product of `[m, k]` and a weight `[n, k]`.
pub(crate) fn product(m: usize, w: Weight) -> (usize, usize) {
    let (n, k) = w.dims();
    let weight = match w.stored() {
        Stored::F32(_) => 4 * n * k,
        Stored::Bf16(_) => 2 * n * k,
        Stored::Quantised(w) => w.num_bytes(),
    };
    (2 * m * k * n, weight + 4 * m * (n + k))
}

/// Returns the operations and bytes of [`product`]s of several weights and the same input, which is read once.
pub(crate) fn products(m: usize, layers: &[Layer]) -> (usize, usize) {
    let each = layers.iter().map(|layer| product(m, layer.w));
    let (flops, bytes) = each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let input = layers.first().map_or(0, |layer| 4 * m * layer.w.dims().1);
    (flops, bytes - input * layers.len().saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    // There is only one test because the counters are global to the process.
    #[test]
    fn work_is_counted_once_by_phase_and_only_when_asked() {
        drop(span(Op::Norm, || unreachable!("off")));
        enable(true);
        let before = enter("forward");
        for _ in 0..2 {
            let outer = span(Op::Head, || (100, 10));
            drop(span(Op::Linear, || (1, 1)));
            drop(outer);
        }
        assert_eq!(enter("backward"), "forward");
        drop(span(Op::LinearInput, || (7, 3)));
        enter(before);
        enable(false);
        drop(span(Op::Norm, || (1, 1)));
        // Other tests of this binary may have run kernels, and counted them, at the same time.
        let own = take();
        let of = |phase, op| own.entries.iter().find(|e| e.phase == phase && e.op == op).map(|e| e.total);
        let head = of("forward", Op::Head).unwrap_or_default();
        assert_eq!((head.calls, head.flops, head.bytes), (2, 200, 20));
        assert!(of("backward", Op::LinearInput).is_some_and(|t| t.flops >= 7));
        assert!(own.phases.iter().any(|phase| phase.name == "forward" && phase.threads() >= 1.0));
        let (time, helped) = (Duration::from_secs(4), Duration::from_secs(3));
        assert_eq!(Phase { name: "decode", time, helped }.threads(), 1.75);
        assert_eq!(take().entries, []);
    }
}
