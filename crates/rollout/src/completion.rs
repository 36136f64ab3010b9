//! Sampled completions.

use std::ops::Range;
use std::sync::Arc;

use omnigrpo_data::{RecordedCompletion, RecordedTurn};
use omnigrpo_models::{AddedTurn, Prompt};
use omnigrpo_text::tool_calls;

/// Reason why a completion ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// Stop token or stop string.
    Stop,
    /// Length limit.
    Length,
}

/// A sampled completion.
#[derive(Clone, Debug, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Completion {
    /// Token ids, including stop tokens and the turns of an environment.
    pub ids: Vec<u32>,
    /// Log-probability of each sampled token under softmax(logits / scoring temperature), in nats.
    pub logprobs: Vec<f32>,
    /// Log-probability of each sampled token under the distribution it was drawn from (after penalties and truncation), in
    /// nats.
    pub sampler_logprobs: Vec<f32>,
    /// Entropy of softmax(logits / scoring temperature) at each sampled token, in nats.
    pub entropies: Vec<f32>,
    pub finish_reason: FinishReason,
    /// Decoded text of the last turn of the model, without control tokens, truncated before a stop string.
    pub text: String,
    /// Turns of an environment, in order.
    #[serde(skip)]
    pub turns: Vec<AddedTurn>,
    /// Decoded text of the turn of the model before each turn of the environment.
    #[serde(default)]
    pub earlier: Vec<String>,
    /// Number of tool calls that were answered.
    #[serde(default)]
    pub calls: usize,
    /// Number of answered calls that failed.
    #[serde(default)]
    pub failed_calls: usize,
    /// Experts of each token that the model read after the prompt, `[tokens, blocks]`, as numbers to compare with
    /// ([`PackedStream::comparing_experts`](omnigrpo_models::PackedStream::comparing_experts)). Empty for a model without experts, on a
    /// GPU, and if [`GenerateOptions::experts`](crate::GenerateOptions::experts) is false.
    #[serde(default)]
    pub experts: Vec<u32>,
}

impl Completion {
    /// Creates a completion that was recorded elsewhere, without log-probabilities and entropies.
    pub fn recorded(ids: Vec<u32>, finish_reason: FinishReason, text: String) -> Self {
        let (logprobs, sampler_logprobs, entropies) = (Vec::new(), Vec::new(), Vec::new());
        Self {
            ids,
            logprobs,
            sampler_logprobs,
            entropies,
            finish_reason,
            text,
            turns: Vec::new(),
            earlier: Vec::new(),
            calls: 0,
            failed_calls: 0,
            experts: Vec::new(),
        }
    }

    /// Creates a completion from the record in a row, for rewards. Its turns have texts, sources of media and ids, but no media. If the
    /// record does not tell which of its ids are those of an environment, the completion has no ids.
    pub fn of_record(recorded: &RecordedCompletion) -> Self {
        let reason = match recorded.finish_reason.as_deref() {
            Some("length") => FinishReason::Length,
            _ => FinishReason::Stop,
        };
        let mut ids = recorded.completion_ids.clone().unwrap_or_default();
        let mut next = 0;
        let spans = recorded.turns.iter().map(|turn| {
            let start = turn.model_tokens?.checked_add(next)?;
            next = turn.tokens?.checked_add(start).filter(|end| *end <= ids.len())?;
            Some(start..next)
        });
        let spans: Option<Vec<Range<usize>>> = spans.collect();
        let spans = spans.unwrap_or_else(|| {
            ids.clear();
            vec![0..0; recorded.turns.len()]
        });
        let added = |(turn, span): (&RecordedTurn, Range<usize>)| AddedTurn {
            start: span.start,
            turn: Arc::new(Prompt {
                ids: ids[span].to_vec(),
                spans: Vec::new(),
                positions: Vec::new(),
                next_position: 0,
                media: Vec::new(),
                instruction: Vec::new(),
                text: String::new(),
            }),
            media: Vec::new(),
            sources: turn.media.clone(),
            said: turn.said.clone(),
        };
        let turns = recorded.turns.iter().zip(spans).map(added).collect();
        let earlier: Vec<String> = recorded.turns.iter().map(|turn| turn.model.clone()).collect();
        let calls = earlier.iter().map(|said| tool_calls(said).len()).sum();
        let text = recorded.text.clone().unwrap_or_default();
        Self { turns, earlier, calls, ..Self::recorded(ids, reason, text) }
    }

    /// Returns the number of sampled tokens: all tokens but those of an environment.
    pub fn num_sampled(&self) -> usize {
        self.ids.len() - self.turns.iter().map(|turn| turn.turn.ids.len()).sum::<usize>()
    }

    /// Returns the tokens of each turn of the model, in order.
    pub fn model_turns(&self) -> impl Iterator<Item = &[u32]> {
        let end = self.ids.len()..self.ids.len();
        let ends = self.turns.iter().map(AddedTurn::tokens).chain(std::iter::once(end));
        ends.scan(0, |from, end| Some(&self.ids[std::mem::replace(from, end.end)..end.start]))
    }

    /// Returns the sampled tokens, without those of an environment.
    pub fn sampled_ids(&self) -> Vec<u32> {
        self.model_turns().flatten().copied().collect()
    }

    /// Returns the tokens of the last turn of the model.
    pub(crate) fn last_turn(&self) -> Range<usize> {
        self.turns.last().map_or(0, |turn| turn.tokens().end)..self.ids.len()
    }
}
