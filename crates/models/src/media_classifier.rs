//! Models of a family with one scalar output: reward models that see and hear.
//!
//! The checkpoint is one of a family, its head a linear layer on the last token of a finished conversation, behind the final
//! norm. Two forms are known: `score.weight` `[1, hidden]` among the weights, as `transformers` 5.23 saves it
//! (`modeling_layers.py`, `GenericForSequenceClassification`, the form of `Gemma3ForSequenceClassification`), and
//! `v_head.summary.weight` with `v_head.summary.bias`, in `value_head.safetensors` or among the weights, as TRL's
//! `AutoModelForCausalLMWithValueHead` does (Skywork-VL-Reward). A language model's head may be there and has no part.
//!
//! Completions of one prompt are one packed stream: its media go through the towers once, and its tokens through the language
//! model. Refused: several outputs, checkpoints without head, heads of several layers.

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
use crate::families::{FamilyRow, MediumInput};
use crate::model::Model;
use crate::prompt::{Prompt, PromptBuilder, PromptSettings};
use crate::stream::{GroupStream, PackedStream};
use crate::weights::{FileSource, Scope, WeightDtype, WeightFiles};

/// The head of `transformers`, and TRL's.
const HEADS: [&str; 2] = ["score", "v_head.summary"];
/// Where TRL keeps its head.
const VALUE_HEAD: &str = "value_head.safetensors";

/// A model of a family that gives each finished conversation one number.
pub struct MediaClassifier {
    model: Model,
    prompts: PromptBuilder,
    head: Linear,
}

/// Conversations that begin alike, with the same media.
struct Group<'a> {
    /// Shared tokens; the media are among them.
    prefix: usize,
    conversations: Vec<&'a Prompt>,
}

impl MediaClassifier {
    /// Whether the checkpoint in `dir` is one of a family.
    ///
    /// # Errors
    /// An unreadable `config.json`.
    pub fn is_one(dir: &Path) -> Result<bool> {
        Ok(FamilyRow::of(&ConfigJson::read(&dir.join("config.json"))?).is_some())
    }

    /// Loads a checkpoint directory, frozen. `render` holds what conversations are rendered with, such as a system text.
    ///
    /// # Errors
    /// Unreadable files, an unknown family, no head or one with several outputs, tensors that do not fit.
    pub fn load(dir: &Path, dtype: WeightDtype, render: RenderOptions) -> Result<Self> {
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
        let mut source = FileSource::new(&files, dtype);
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
    /// An unreadable medium, a kind this family does not take.
    pub fn media(&self, media: &[MediumRef]) -> Result<Vec<Arc<MediumInput>>> {
        self.prompts.media(media)
    }

    /// A finished conversation with its media, in this checkpoint's own template.
    pub fn conversation(&self, turns: &[Turn], media: Vec<Arc<MediumInput>>) -> Result<Prompt> {
        self.prompts.finished(turns, media)
    }

    /// The most tokens that a conversation may have.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.model.decoder().config().max_positions
    }

    /// The tokens of a conversation that can be read, from the headers of its media alone.
    ///
    /// # Errors
    /// As [`PromptBuilder::finished`]; a medium that is unreadable, or of a kind this family does not take.
    pub fn check(&self, turns: &[Turn], media: &[MediumRef]) -> Result<usize> {
        self.prompts.check_finished(turns, media)
    }

    /// One number per conversation. Neighbours with the same media, and the same tokens up to them, share both.
    ///
    /// # Errors
    /// Conversations of another checkpoint.
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
            // The stream takes what it would predict: a token behind the last one, which nothing reads.
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

/// Puts each conversation into the group before it where they have the same media and begin alike up to the last of them, and
/// the group stays within [`MAX_ROWS`] rows. Groups of one have a last token of their own.
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
