//! Models of a family with one scalar output: reward models that read images, video and sound.
//!
//! The checkpoint belongs to a model family. Its head is a linear layer on the last token of a finished conversation, after the
//! final norm. Two forms are supported: `score.weight` `[1, hidden]` among the weights, as `transformers` 5.23 saves it
//! (`modeling_layers.py`, `GenericForSequenceClassification`, the form of `Gemma3ForSequenceClassification`), and
//! `v_head.summary.weight` with `v_head.summary.bias`, in `value_head.safetensors` or among the weights, as TRL's
//! `AutoModelForCausalLMWithValueHead` does (Skywork-VL-Reward). The head of a language model may be present and is not used.
//!
//! Completions of one prompt form one packed stream: the prompt's media go through the towers once, and its tokens through the
//! language model once. Unsupported: several outputs, checkpoints without a head, heads of several layers.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use omnigrpo_data::MediumRef;
use omnigrpo_ops::{Linear, PackedLinear, Part};
use omnigrpo_text::{RenderOptions, Turn};

use crate::checkpoint::Checkpoint;
use crate::classifier::{MAX_ROWS, one_output};
use crate::config_json::ConfigJson;
use crate::error::Result;
use crate::families::{FamilyRow, MediumInput, TextClass};
use crate::model::Model;
use crate::prompt::{Prompt, PromptBuilder, PromptSettings};
use crate::stream::{GroupStream, PackedStream};
use crate::weights::{FileSource, FrozenWeights, Scope, WeightFiles};

/// Names of the heads of `transformers` and of TRL.
const HEADS: [&str; 2] = ["score", "v_head.summary"];
/// File in which TRL stores its head.
const VALUE_HEAD: &str = "value_head.safetensors";

/// A model of a family that gives each finished conversation one score.
pub struct MediaClassifier {
    model: Model,
    prompts: PromptBuilder,
    head: Linear,
}

/// Conversations that share their first tokens and their media.
struct Group<'a> {
    /// Number of shared tokens, which include those of the media.
    prefix: usize,
    conversations: Vec<&'a Prompt>,
}

impl MediaClassifier {
    /// Returns whether the checkpoint in `dir` belongs to a supported family with media.
    ///
    /// # Errors
    /// Returns an error if `config.json` is unreadable.
    pub fn is_one(dir: &Path) -> Result<bool> {
        let json = ConfigJson::read(&dir.join("config.json"))?;
        let text = json.text("model_type")?.and_then(TextClass::named);
        Ok(text.is_none() && FamilyRow::of(&json).is_some())
    }

    /// Loads a checkpoint directory, frozen. `render` contains the settings for rendering conversations, such as a system prompt.
    ///
    /// # Errors
    /// Returns an error if files are unreadable, the family is unknown, the head is missing or has several outputs, or tensors do
    /// not fit.
    pub fn load(dir: &Path, how: impl Into<FrozenWeights>, render: RenderOptions) -> Result<Self> {
        let checkpoint = Checkpoint::open(dir)?;
        let settings = PromptSettings { render, max_completion_length: 0, ..PromptSettings::default() };
        let prompts = PromptBuilder::open(&checkpoint, settings)?;
        let family = checkpoint.family();
        let is_head = |key: &str| {
            HEADS.iter().any(|head| key.strip_prefix(head).is_some_and(|end| end.starts_with('.')))
        };
        let name = |key: &str| {
            if is_head(key) { Some(key.to_owned()) } else { family.format().published_name(key) }
        };
        let mut files = WeightFiles::open(dir, name)?;
        let beside = dir.join(VALUE_HEAD);
        if beside.is_file() {
            let own = |key: &str| is_head(key).then(|| key.to_owned());
            files.add_file(&beside, own, &mut HashMap::new())?;
        }
        let outside = files.add_companions(&family.format().companions())?;
        let has = |name: &str| files.shape(name).is_some();
        let head = HEADS.into_iter().find(|head| has(&format!("{head}.weight"))).unwrap_or(HEADS[0]);
        one_output(checkpoint.config(), &files, head)?;
        let mut source = FileSource::new(&files, how);
        let network = family.architecture().network(&mut source)?;
        let hidden = network.decoder.config().hidden;
        let bias = has(&format!("{head}.bias"));
        let head = Scope::new(&mut source, "", Part::Llm).linear(head, 1, hidden, bias)?;
        let params = source.finish(family.name())?;
        let model = Model::new(checkpoint.clone(), network, params, outside, omnigrpo_ops::Device::Cpu);
        Ok(Self { model, prompts, head })
    }

    /// Reads media as this checkpoint's processor does.
    ///
    /// # Errors
    /// Returns an error if a medium is unreadable or of a kind that this family does not support.
    pub fn media(&self, media: &[MediumRef]) -> Result<Vec<Arc<MediumInput>>> {
        self.prompts.media(media)
    }

    /// Builds a finished conversation with its media, in this checkpoint's own template.
    pub fn conversation(&self, turns: &[Turn], media: Vec<Arc<MediumInput>>) -> Result<Prompt> {
        self.prompts.finished(turns, media)
    }

    /// Returns the largest number of tokens of a conversation.
    pub fn max_tokens(&self) -> usize {
        self.model.decoder().config().max_positions
    }

    /// Checks that a conversation can be read, and counts its tokens. Reads only the headers of its media.
    ///
    /// # Errors
    /// Returns an error as [`PromptBuilder::finished`] does, or if a medium is unreadable or of a kind that this family does not
    /// support.
    pub fn check(&self, turns: &[Turn], media: &[MediumRef]) -> Result<usize> {
        self.prompts.check_finished(turns, media)
    }

    /// Computes one score per conversation. Consecutive conversations with the same media, and the same tokens up to the last of
    /// them, are run with one shared prefix.
    ///
    /// # Errors
    /// Returns an error if conversations were built for another checkpoint.
    pub fn scores(&self, conversations: &[Prompt]) -> Result<Vec<f32>> {
        let mut scores = Vec::with_capacity(conversations.len());
        for Group { prefix, conversations } in shared(conversations) {
            let first = conversations[0];
            let prefix = prefix.min(first.ids.len());
            let prompt = Prompt {
                ids: first.ids[..prefix].to_vec(),
                positions: first.positions[..prefix].to_vec(),
                next_position: first.positions.get(prefix).map_or(first.next_position, |axes| axes[0]),
                ..first.clone()
            };
            // A stream scores the prediction of each completion token, so a token is added after the last one. Its value is not
            // used.
            let ends: Vec<Vec<u32>> =
                conversations.iter().map(|own| [&own.ids[prefix..], &[0]].concat()).collect();
            let completions = ends.iter().map(Vec::as_slice).collect();
            let stream = PackedStream::new(&[GroupStream { prompt: &prompt, completions }])?;
            let features = self.model.encode_prompt(&prompt)?;
            let hidden = self.model.hidden_before_last(&stream, &[features])?;
            scores.extend(PackedLinear::new(&[&self.head], &self.model.pass()).forward(&hidden)?.to_vec());
        }
        Ok(scores)
    }
}

/// Adds each conversation to the previous group if both have the same media, agree in all tokens up to the last medium, and the
/// group stays within [`MAX_ROWS`] rows. In each group, the shared prefix excludes at least the last token of each conversation.
fn shared(conversations: &[Prompt]) -> Vec<Group<'_>> {
    let same_media = |a: &Prompt, b: &Prompt| {
        a.media.len() == b.media.len()
            && a.media.iter().zip(&b.media).all(|(a, b)| Arc::ptr_eq(a, b))
            && (&a.spans, &a.instruction) == (&b.spans, &b.instruction)
    };
    let mut groups: Vec<Group<'_>> = Vec::new();
    for own in conversations {
        let least = own.spans.iter().map(|span| span.start + span.len).max().unwrap_or(0).max(1);
        let most = own.ids.len().saturating_sub(1);
        if let Some(group) = groups.last_mut() {
            let first = group.conversations[0];
            let alike = first.ids.iter().zip(&own.ids).take_while(|(a, b)| a == b).count();
            let prefix = group.prefix.min(alike).min(most);
            let rows = |own: &&Prompt| own.ids.len() - prefix;
            let all = prefix + group.conversations.iter().map(rows).sum::<usize>() + rows(&own);
            if same_media(first, own) && prefix >= least && all <= MAX_ROWS {
                group.prefix = prefix;
                group.conversations.push(own);
                continue;
            }
        }
        groups.push(Group { prefix: most.max(least), conversations: vec![own] });
    }
    groups
}
