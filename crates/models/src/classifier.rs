//! Text models with one scalar output: the reward models of `AutoModelForSequenceClassification` with `num_labels` 1.
//!
//! A decoder (Qwen2, Qwen3, Llama) has a `score` layer without bias, applied after the final norm to the last row that is not
//! padding. BERT has `classifier` on its pooler's output; RoBERTa, XLM-RoBERTa and CamemBERT have a layer, tanh and `out_proj`
//! on the first row. Source: `transformers` 5.23, `modeling_layers.py` `GenericForSequenceClassification`,
//! `models/{bert,roberta}` `…ForSequenceClassification`.
//!
//! Sequences follow one another without padding. Differences to the source: rows after the scored one are left out, since
//! nothing attends to them; consecutive sequences that begin with the same tokens (the completions of a prompt) share these rows.
//! Unsupported: several labels, checkpoints without a head, DistilBERT, sliding windows.

use std::path::Path;
use std::sync::Arc;

use omnigrpo_ops::{Activation, AttentionLayout, Layout, Linear, PackedLinear, Part, Pass, Rows, Tape};

use crate::config_json::ConfigJson;
use crate::decoder::{Decoder, DecoderConfig, DecoderNames};
use crate::encoders::bert::{Bert, BertConfig, published_name};
use crate::error::{ModelError, Result};
use crate::families::TextClass;
use crate::weights::{FileSource, FrozenWeights, Scope, WeightFiles};

/// Largest number of rows of one pass. A longer sequence has a pass of its own.
pub(crate) const MAX_ROWS: usize = 4096;

/// A text model that gives each sequence one score.
pub struct SequenceClassifier {
    network: Network,
}

enum Network {
    Decoder {
        decoder: Box<Decoder>,
        score: Linear,
    },
    Bert {
        bert: Box<Bert>,
        classifier: Linear,
    },
    /// RoBERTa's head: a layer followed by tanh, and an output layer.
    Roberta {
        bert: Box<Bert>,
        dense: Linear,
        out: Linear,
    },
}

impl SequenceClassifier {
    /// Loads a checkpoint directory, frozen.
    ///
    /// # Errors
    /// Returns an error if files are unreadable, the architecture is unsupported, the head is missing or has several outputs, or
    /// tensors do not fit.
    pub fn load(dir: &Path, how: impl Into<FrozenWeights>) -> Result<Self> {
        let json = ConfigJson::read(&dir.join("config.json"))?;
        let kind = json.text("model_type")?.unwrap_or_default();
        let class = match (TextClass::named(kind), kind) {
            (Some(class), _) => Some(class.defaults),
            (None, "bert" | "roberta" | "xlm-roberta" | "camembert") => None,
            (None, other) => {
                let known = "qwen2, qwen3, llama, bert, roberta, xlm-roberta or camembert";
                return Err(json.error(format!("model_type is {other:?}; a reward model is one of {known}")));
            }
        };
        let files = WeightFiles::open(dir, |key| published(key, kind))?;
        let head = match (class, kind) {
            (Some(_), _) => "score",
            (None, "bert") => "classifier",
            (None, _) => "classifier.out_proj",
        };
        one_output(&json, &files, head)?;
        let mut source = FileSource::new(&files, how);
        let network = if let Some(class) = class {
            let config = DecoderConfig::parse(&json, &json, class)?;
            let h = config.hidden;
            let names = DecoderNames { model: "model.", head: NO_HEAD };
            let decoder = Box::new(Decoder::build(config, names, &mut source)?);
            Network::Decoder {
                decoder,
                score: Scope::new(&mut source, "", Part::Llm).linear(head, 1, h, false)?,
            }
        } else {
            let config = BertConfig::parse(&json)?;
            let c = config.sizes.hidden;
            let bert = Box::new(Bert::build(config, kind == "bert", "", Part::Llm, &mut source)?);
            let mut weights = Scope::new(&mut source, "", Part::Llm);
            match kind {
                "bert" => Network::Bert { bert, classifier: weights.linear(head, 1, c, true)? },
                _ => Network::Roberta {
                    bert,
                    dense: weights.linear("classifier.dense", c, c, true)?,
                    out: weights.linear(head, 1, c, true)?,
                },
            }
        };
        source.finish("sequence classifier")?;
        Ok(Self { network })
    }

    /// Returns the length of the longest supported sequence, in tokens.
    pub fn max_tokens(&self) -> usize {
        match &self.network {
            Network::Decoder { decoder, .. } => decoder.config().max_positions,
            Network::Bert { bert, .. } | Network::Roberta { bert, .. } => bert.config().max_tokens(),
        }
    }

    /// Returns whether the model is an encoder. The head of an encoder reads the row of the start token, which the tokenizer
    /// adds.
    pub fn is_encoder(&self) -> bool {
        !matches!(self.network, Network::Decoder { .. })
    }

    /// Computes one score per sequence of token ids. For a decoder, the score is read at the last token other than `padding`.
    ///
    /// # Errors
    /// Returns an error if a sequence is empty or too long, or an id is outside the vocabulary.
    pub fn scores(&self, sequences: &[&[u32]], padding: Option<u32>, pass: &Pass) -> Result<Vec<f32>> {
        let most = self.max_tokens();
        if let Some(bad) = sequences.iter().find(|s| s.is_empty() || s.len() > most) {
            return Err(ModelError::shape(format!(
                "reward model: a sequence has {} tokens; expected 1 to {most}",
                bad.len()
            )));
        }
        match &self.network {
            Network::Decoder { decoder, score } => {
                let scored: Vec<&[u32]> = sequences.iter().map(|ids| up_to_last(ids, padding)).collect();
                let groups = shared(&scored);
                let mut out = Vec::with_capacity(sequences.len());
                for groups in passes(&groups, Group::rows) {
                    out.extend(decode(decoder, score, groups, pass)?);
                }
                Ok(out)
            }
            Network::Bert { bert, classifier } => in_passes(sequences, |some| {
                let pooled = bert.pooled(some, pass, &mut Tape::off())?.into_rows();
                Ok(PackedLinear::new(&[classifier], pass).forward(&pooled)?)
            }),
            Network::Roberta { bert, dense, out } => in_passes(sequences, |some| {
                let first = bert.first(some, pass, &mut Tape::off())?.into_rows();
                let inner = PackedLinear::new(&[dense], pass).forward(&first)?.activated(Activation::Tanh);
                Ok(PackedLinear::new(&[out], pass).forward(&inner)?)
            }),
        }
    }
}

/// Name of a language model's output head. These checkpoints do not have it, and the decoder then uses its embedding instead.
const NO_HEAD: &str = "lm_head.weight";

/// Maps a key of a file to the name used here, or to `None` if the tensor does not affect the score.
fn published(key: &str, kind: &str) -> Option<String> {
    match kind {
        "bert" | "roberta" | "xlm-roberta" | "camembert" if key.starts_with("classifier.") => {
            Some(key.to_owned())
        }
        "bert" => published_name(key),
        "roberta" | "xlm-roberta" | "camembert" => {
            published_name(key).filter(|name| !name.starts_with("pooler."))
        }
        _ => (key != NO_HEAD && !key.ends_with(".rotary_emb.inv_freq")).then(|| key.to_owned()),
    }
}

pub(crate) fn one_output(json: &ConfigJson, files: &WeightFiles, head: &str) -> Result<()> {
    match files.shape(&format!("{head}.weight")) {
        Some([1, _]) => Ok(()),
        Some(shape) => Err(json.error(format!(
            "{head}.weight has shape {shape:?}, so num_labels is {}; expected num_labels 1 with a [1, width] head",
            shape.first().unwrap_or(&0)
        ))),
        None => Err(json.error(format!(
            "the files have no {head}.weight; expected a reward model, saved by \
             AutoModelForSequenceClassification with num_labels=1"
        ))),
    }
}

/// Returns a sequence up to its last token that is not padding, or its first token if all are padding.
fn up_to_last(ids: &[u32], padding: Option<u32>) -> &[u32] {
    let last = ids.iter().rposition(|&id| Some(id) != padding).unwrap_or(0);
    &ids[..=last]
}

/// Consecutive sequences that share their first tokens.
struct Group<'a> {
    /// Number of shared tokens, fewer than the length of any sequence.
    prefix: usize,
    sequences: Vec<&'a [u32]>,
}

impl Group<'_> {
    fn rows(&self) -> usize {
        self.prefix + self.sequences.iter().map(|s| s.len() - self.prefix).sum::<usize>()
    }
}

/// Adds each sequence to the previous group if this takes fewer rows than a new group, within [`MAX_ROWS`] rows.
fn shared<'a>(sequences: &[&'a [u32]]) -> Vec<Group<'a>> {
    let mut groups: Vec<Group<'a>> = Vec::new();
    for &sequence in sequences {
        if let Some(group) = groups.last_mut() {
            let before = group.rows();
            let same = group.sequences[0].iter().zip(sequence).take_while(|(a, b)| a == b).count();
            let old = group.prefix;
            let shortest = group.sequences.iter().map(|s| s.len()).fold(sequence.len(), usize::min) - 1;
            group.prefix = match group.sequences.len() {
                1 => same.min(shortest),
                _ => old.min(same).min(shortest),
            };
            group.sequences.push(sequence);
            let rows = group.rows();
            if group.prefix > 0 && rows < before + sequence.len() && rows <= MAX_ROWS {
                continue;
            }
            group.sequences.pop();
            group.prefix = old;
        }
        groups.push(Group { prefix: 0, sequences: vec![sequence] });
    }
    groups
}

/// Splits a list into consecutive parts of at most [`MAX_ROWS`] rows. A single longer item is a part of its own.
fn passes<T>(items: &[T], rows: impl Fn(&T) -> usize) -> Vec<&[T]> {
    let (mut out, mut start, mut sum) = (Vec::new(), 0, 0);
    for (i, item) in items.iter().enumerate() {
        let more = rows(item);
        if i > start && sum + more > MAX_ROWS {
            out.push(&items[start..i]);
            (start, sum) = (i, 0);
        }
        sum += more;
    }
    if start < items.len() {
        out.push(&items[start..]);
    }
    out
}

fn in_passes(sequences: &[&[u32]], run: impl Fn(&[&[u32]]) -> Result<Rows>) -> Result<Vec<f32>> {
    let mut out = Vec::with_capacity(sequences.len());
    for some in passes(sequences, |s| s.len()) {
        out.extend(run(some)?.to_vec());
    }
    Ok(out)
}

fn decode(decoder: &Decoder, score: &Linear, groups: &[Group], pass: &Pass) -> Result<Vec<f32>> {
    let (mut ids, mut positions, mut ends, mut shapes) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for group in groups {
        let prefix = group.prefix;
        let mut push = |tokens: &[u32], from: usize| {
            ids.extend_from_slice(tokens);
            positions.extend((from..from + tokens.len()).map(|p| [p as u32; 3]));
            ids.len() - 1
        };
        if prefix > 0 {
            push(&group.sequences[0][..prefix], 0);
        }
        for sequence in &group.sequences {
            ends.push(push(&sequence[prefix..], prefix));
        }
        match prefix {
            // A group of one sequence has no prefix.
            0 => shapes.push((group.sequences[0].len(), Vec::new())),
            _ => shapes.push((prefix, group.sequences.iter().map(|s| s.len() - prefix).collect())),
        }
    }
    let layout: Arc<Layout> = Arc::new(AttentionLayout::groups(&shapes).into());
    let mut tape = Tape::off();
    let x = tape.input(decoder.embed(&ids, pass)?);
    let rope = decoder.rope_table(&positions);
    let hidden = decoder.forward(x, &rope, &layout, &ends, pass, &mut tape)?.into_rows();
    Ok(PackedLinear::new(&[score], pass).forward(&decoder.normed(&hidden)?)?.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_share_what_they_begin_with() {
        let plan = |sequences: &[&[u32]]| -> Vec<(usize, usize, usize)> {
            shared(sequences).iter().map(|g| (g.prefix, g.sequences.len(), g.rows())).collect()
        };
        // Two prompts of three tokens. The same completion twice still takes its rows twice.
        let rows: [&[u32]; 5] = [&[1, 2, 3, 4], &[1, 2, 3, 5, 6], &[1, 2, 3, 5, 6], &[7, 8, 9], &[7, 8, 9]];
        assert_eq!(plan(&rows), [(3, 3, 8), (2, 2, 4)]);
        // A shared start token is not a reason to shorten a group's prefix.
        assert_eq!(plan(&[&[1, 2, 3, 4], &[1, 2, 3, 5], &[1, 9, 9]]), [(3, 2, 5), (0, 1, 3)]);
        assert_eq!(plan(&[&[1], &[1]]), [(0, 1, 1), (0, 1, 1)]);
        let long = vec![1; MAX_ROWS - 1];
        assert_eq!(plan(&[&long, &[1, 1, 1, 2, 2, 2]]).len(), 2);
        let cut: Vec<usize> = passes(&[3000, 1000, 97, 5000, 1], |&n| n).iter().map(|p| p.len()).collect();
        assert_eq!(cut, [2, 1, 1, 1]);
    }

    #[test]
    fn the_last_token_that_is_no_padding() {
        assert_eq!(up_to_last(&[5, 0, 7, 0, 0], Some(0)), [5, 0, 7]);
        assert_eq!(up_to_last(&[5, 0], None), [5, 0]);
        assert_eq!(up_to_last(&[0, 0], Some(0)), [0]);
    }
}
