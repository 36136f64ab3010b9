//! The rules of one completion: how its tokens are drawn and what ends it.

use omnigrpo_models::{DecoderMemory, Features, Model, Prompt};
use omnigrpo_ops::{Draw, DrawFrom, GroupCache, Rows, Sampler};
use omnigrpo_text::{StopMatcher, StopSet, StreamDecoder, Tokenizer};

use crate::completion::{Completion, FinishReason};
use crate::error::Result;
use crate::sample::{SampleKey, SamplingParams};

/// Sampling parameters and stops, with the tokenizer that they refer to.
#[derive(Clone, Copy)]
pub(crate) struct Rules<'a> {
    pub(crate) params: &'a SamplingParams,
    pub(crate) stops: &'a StopSet,
    pub(crate) tokenizer: &'a Tokenizer,
    /// True if control tokens are no part of the text.
    pub(crate) skip_special: bool,
}

impl<'a> Rules<'a> {
    /// Returns the settings of draws.
    pub(crate) fn sampler(&self) -> Sampler<'a> {
        self.params.sampler(&self.stops.ids)
    }

    /// Returns the inputs of a completion's next draw.
    pub(crate) fn draw_from<'s>(
        &self,
        prompt: &'s [u32],
        done: &'s Completion,
        key: SampleKey,
    ) -> DrawFrom<'s> {
        DrawFrom {
            seen: [prompt, done.ids.as_slice()],
            forbids: done.logprobs.len() < self.params.min_completion_length,
            uniform: key.uniform(self.params.seed, done.ids.len()),
        }
    }

    /// Returns true if a completion is long enough to end with a stop token.
    pub(crate) fn may_stop(&self, done: &Completion) -> bool {
        done.logprobs.len() >= self.params.min_completion_length
    }

    /// Appends a drawn token to its completion. Returns true if it completes a stop string.
    pub(crate) fn append(&self, done: &mut Completion, matcher: &mut StopMatcher, drawn: Draw) -> bool {
        done.ids.push(drawn.id);
        done.logprobs.push(drawn.logprob);
        done.sampler_logprobs.push(drawn.sampler_logprob);
        done.entropies.push(drawn.entropy);
        let hit =
            !self.stops.strings.is_empty() && matcher.push(&self.tokenizer.token_bytes(drawn.id)).is_some();
        // A stop string ends the completion whatever its length: the text is truncated there in any case.
        if hit || (self.may_stop(done) && self.stops.is_stop(drawn.id)) {
            done.finish_reason = FinishReason::Stop;
        }
        hit
    }

    /// Returns true if a completion ends with its last token.
    pub(crate) fn is_over(&self, done: &Completion) -> bool {
        done.finish_reason == FinishReason::Stop || done.ids.len() >= self.params.max_completion_length
    }

    /// Decodes completion ids to text, truncated before a stop string. A stop token at the end is no part of it, even where other
    /// control tokens are.
    pub(crate) fn text_of(&self, ids: &[u32]) -> Result<String> {
        let ids = match ids.split_last() {
            Some((last, said)) if !self.skip_special && self.stops.is_stop(*last) => said,
            _ => ids,
        };
        if self.stops.strings.is_empty() {
            return Ok(self.tokenizer.decode(ids, self.skip_special)?);
        }
        let mut matcher = StopMatcher::new(self.stops);
        let mut decoder = StreamDecoder::new(self.skip_special);
        let mut text = String::new();
        for &id in ids {
            text.push_str(&decoder.push(self.tokenizer, id));
            if matcher.push(&self.tokenizer.token_bytes(id)).is_some() {
                break;
            }
        }
        text.push_str(&decoder.finish());
        let cut = self.stops.strings.iter().filter_map(|s| text.find(s.as_str())).min();
        text.truncate(cut.unwrap_or(text.len()));
        Ok(text)
    }
}

/// Runs a prompt with the cache of its completions. Returns the logits of their first token, `[1, vocab]`.
pub(crate) fn prefill(
    model: &Model,
    prompt: &Prompt,
    features: &[Features],
    num_samples: usize,
    max_length: usize,
    mut memory: Option<&mut DecoderMemory>,
) -> Result<(GroupCache, Rows)> {
    let (decoder, pass) = (model.decoder(), model.pass());
    // The last token of a completion is not read.
    let mut cache = decoder.cache(prompt.ids.len(), num_samples, max_length - 1, &pass)?;
    let x = model.embed_prompt(prompt, features)?;
    if let Some(memory) = memory.as_deref_mut() {
        memory.begin_prompt(&prompt.ids, num_samples, max_length);
    }
    let rope = decoder.rope_table(&prompt.positions);
    let hidden = decoder.prefill(x, &rope, &mut cache, &pass, memory)?;
    Ok((cache, decoder.logits(&hidden)?))
}
