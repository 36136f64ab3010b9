//! Environments: what answers a model in the middle of a completion, such as a tool that crops a picture.
//!
//! An [`Environment`] begins an [`Episode`] for each completion. The episode answers the turns of the model. Its answer, text and
//! media, becomes a turn of the completion, and sampling goes on after it. Episodes run on other threads, so the other completions
//! decode while one waits. The random numbers of a token do not depend on when an answer arrived.
//!
//! The model's turn is not tokenised again, and no token that was read before is read again.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use omnigrpo_data::{Cause, MediumOptions, MediumRef, MediumSource, Sample};
use omnigrpo_text::{MediumKind, Part, PerKind, Role, ToolCall};
use serde_json::{Value, json};

/// A source of answers to the turns of a model.
///
/// ```
/// use std::sync::Arc;
///
/// use omnigrpo_data::{Cause, Sample};
/// use omnigrpo_rollout::{
///     Answer, AnswerPart, Environment, Episode, EpisodeKey, Interaction, ModelTurn, SamplingParams, TurnLimits, answer_calls,
/// };
/// use serde_json::{Value, json};
///
/// /// A tool that adds two numbers.
/// struct Sum;
///
/// impl Environment for Sum {
///     fn name(&self) -> &str {
///         "sum"
///     }
///
///     fn tools(&self) -> Vec<Value> {
///         let number = json!({ "type": "number" });
///         let parameters = json!({ "type": "object", "properties": { "a": number, "b": number } });
///         vec![json!({ "type": "function", "function": { "name": "sum", "parameters": parameters } })]
///     }
///
///     fn begin(&self, _row: &Sample, _key: EpisodeKey) -> Result<Box<dyn Episode>, Cause> {
///         Ok(Box::new(Self))
///     }
/// }
///
/// impl Episode for Sum {
///     fn answer(&mut self, turn: &ModelTurn<'_>) -> Result<Answer, Cause> {
///         Ok(answer_calls(turn, |call| {
///             let number = |name: &str| call.arguments.get(name).and_then(Value::as_f64);
///             let sum = number("a").zip(number("b")).map(|(a, b)| a + b);
///             Ok(vec![AnswerPart::Text(sum.ok_or("expected the numbers `a` and `b`")?.to_string())])
///         }))
///     }
/// }
///
/// let said = r#"<tool_call>{"name": "sum", "arguments": {"a": 2, "b": 3}}</tool_call>"#;
/// let calls = omnigrpo_text::tool_calls(said);
/// let turn = ModelTurn { text: said, ids: &[], calls: &calls, number: 1, tokens_left: 100, media_left: 4 };
/// let Answer::Say { parts, failed: 0, .. } = Sum.answer(&turn)? else { panic!() };
/// assert_eq!(parts, [AnswerPart::Text("5".to_owned())]);
/// // A generator asks the environment during sampling. The tools go into the prompt by `RenderOptions::tools`.
/// let sampling = SamplingParams { turns: Some(TurnLimits::default()), ..SamplingParams::default() };
/// let interaction = Interaction::new(Arc::new(Sum));
/// # assert!(sampling.validate().is_ok() && interaction.environment.name() == "sum");
/// # Ok::<(), Cause>(())
/// ```
pub trait Environment: Send + Sync {
    /// Returns the name in errors and records.
    fn name(&self) -> &str;

    /// Returns the tools that the prompt describes, in the format of OpenAI: `{"type": "function", "function": {…}}`.
    fn tools(&self) -> Vec<Value> {
        Vec::new()
    }

    /// Returns true if the environment answers every turn, and false if it answers only turns that call a tool.
    fn answers_text(&self) -> bool {
        false
    }

    /// Adds to the last turn of a row what the model reads before its first turn ([`append`]). All completions of the row share it,
    /// and a resumed run asks for it again, so it must follow from the row.
    ///
    /// # Errors
    /// Returns an error if the environment cannot work. The error ends the run. [`ModelError::SaysTooMuch`](omnigrpo_models::ModelError::SaysTooMuch) makes the row unusable
    /// instead.
    fn open(&self, _row: &mut Sample) -> Result<(), Cause> {
        Ok(())
    }

    /// Begins the episode of one completion of a row. Everything random in it must follow from `key`.
    ///
    /// # Errors
    /// Returns an error if the environment cannot work. The error ends the run.
    fn begin(&self, row: &Sample, key: EpisodeKey) -> Result<Box<dyn Episode>, Cause>;
}

/// The part of an environment that belongs to one completion.
pub trait Episode: Send {
    /// Answers a turn of the model.
    ///
    /// # Errors
    /// Returns an error if the environment cannot work. The error ends the run. A mistake of the model is no error but an answer
    /// that describes it, for the model to read. [`ModelError::SaysTooMuch`](omnigrpo_models::ModelError::SaysTooMuch) ends the completion instead, as an answer does that
    /// exceeds a limit.
    fn answer(&mut self, turn: &ModelTurn<'_>) -> Result<Answer, Cause>;
}

/// Identity of a completion in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpisodeKey {
    /// Seed of the run.
    pub seed: u64,
    /// Number of the rollout in the run.
    pub rollout: u64,
    /// Index of the row in its dataset.
    pub row: u64,
    /// Number of the completion among those of the row.
    pub sample: u32,
}

/// A finished turn of the model.
#[derive(Clone, Copy, Debug)]
pub struct ModelTurn<'a> {
    /// Text of the turn, without its stop token.
    pub text: &'a str,
    /// Token ids of the turn, with its stop token.
    pub ids: &'a [u32],
    /// Calls of tools in it. A call that cannot be read is a description of the problem.
    pub calls: &'a [Result<ToolCall, String>],
    /// Number of the turn in the completion, from 1.
    pub number: usize,
    /// Largest number of tokens that an answer may have.
    pub tokens_left: usize,
    /// Largest number of media that an answer may have.
    pub media_left: usize,
}

/// Reaction of an episode.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// A turn for the model to read.
    Say {
        /// Speaker: [`Role::Tool`] or [`Role::User`].
        role: Role,
        /// Text and media, in order.
        parts: Vec<AnswerPart>,
        /// Number of calls that failed.
        failed: usize,
    },
    /// The end of the completion.
    Stop,
}

/// Part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum AnswerPart {
    /// Text, which is never read as control tokens.
    Text(String),
    /// Picture, clip or sound.
    Medium {
        /// Kind of the medium.
        kind: MediumKind,
        /// File of the medium. It must stay unchanged as long as a checkpoint of the run may be resumed.
        path: PathBuf,
    },
}

impl AnswerPart {
    /// Returns the reference of a file as a medium.
    pub(crate) fn medium(kind: MediumKind, path: PathBuf) -> MediumRef {
        MediumRef { kind, source: MediumSource::Path(path), options: MediumOptions::default() }
    }
}

/// Appends text and media to the last turn of a row.
pub fn append(row: &mut Sample, parts: Vec<AnswerPart>) {
    let mut count = PerKind::<usize>::default();
    row.media.iter().for_each(|medium| count[medium.kind] += 1);
    let Some(last) = row.turns.last_mut() else { return };
    for part in parts {
        match (part, last.parts.last_mut()) {
            (AnswerPart::Text(text), Some(Part::Text(before))) => before.push_str(&text),
            (AnswerPart::Text(text), _) => last.parts.push(Part::Text(text)),
            (AnswerPart::Medium { kind, path }, _) => {
                row.media.push(AnswerPart::medium(kind, path));
                last.parts.push(Part::Medium { kind, index: count[kind] });
                count[kind] += 1;
            }
        }
    }
}

impl Answer {
    /// Returns an answer that lets the model read why its calls failed.
    pub fn failed(what: &str, calls: usize) -> Self {
        Self::Say { role: Role::Tool, parts: vec![error(what)], failed: calls }
    }
}

/// Returns the text by which the model reads of a failure.
fn error(what: &str) -> AnswerPart {
    AnswerPart::Text(json!({ "error": what }).to_string())
}

/// Answers each call in order with what `run` returns. A call that cannot be read, and one that fails, is answered with the error.
pub fn answer_calls(
    turn: &ModelTurn<'_>,
    mut run: impl FnMut(&ToolCall) -> Result<Vec<AnswerPart>, String>,
) -> Answer {
    let (mut parts, mut failed) = (Vec::new(), 0);
    for call in turn.calls {
        if !parts.is_empty() {
            parts.push(AnswerPart::Text("\n".to_owned()));
        }
        let answer = call.as_ref().map_err(String::clone).and_then(&mut run);
        parts.extend(answer.unwrap_or_else(|what| {
            failed += 1;
            vec![error(&what)]
        }));
    }
    Answer::Say { role: Role::Tool, parts, failed }
}

/// An environment that answers the completions of a run.
#[derive(Clone)]
pub struct Interaction {
    /// Environment that answers.
    pub environment: Arc<dyn Environment>,
    /// Time that decoding has waited for answers while no completion could go on, in nanoseconds.
    waited: Arc<AtomicU64>,
}

impl Interaction {
    /// Uses an environment. [`SamplingParams::turns`](crate::SamplingParams::turns) limits its answers.
    pub fn new(environment: Arc<dyn Environment>) -> Self {
        Self { environment, waited: Arc::default() }
    }

    pub(crate) fn add_wait(&self, time: Duration) {
        self.waited.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Returns the time that decoding has waited for answers since the last call, and sets it to 0.
    pub fn take_wait(&self) -> Duration {
        Duration::from_nanos(self.waited.swap(0, Ordering::Relaxed))
    }
}
