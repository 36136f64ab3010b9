//! Threads on which an environment answers while other completions decode.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Instant;

use omnigrpo_data::{Cause, MediumRef, Sample};
use omnigrpo_guard::{Fault, fault, guarded, told};
use omnigrpo_models::{ModelError, Prompt, PromptBuilder};
use omnigrpo_text::{Part, PerKind, Role, ToolCall, Turn};

use crate::environment::{Answer, AnswerPart, Episode, EpisodeKey, Interaction, ModelTurn};
use crate::sample::TurnLimits;

/// Largest number of answers computed at the same time.
const THREADS: usize = 8;

/// Question of a completion to the environment.
pub(crate) struct Question<'a> {
    /// Request and slot of the completion.
    pub(crate) place: (usize, usize),
    pub(crate) key: EpisodeKey,
    pub(crate) row: &'a Sample,
    /// Episode of the completion; `None` before its first turn.
    pub(crate) episode: Option<Box<dyn Episode>>,
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
    pub(crate) calls: Vec<Result<ToolCall, String>>,
    pub(crate) number: usize,
    /// Largest number of tokens of the answer.
    pub(crate) tokens_left: usize,
}

/// Turn of the environment.
pub(crate) struct Said {
    pub(crate) turn: Prompt,
    pub(crate) said: Turn,
    pub(crate) sources: Vec<MediumRef>,
    /// Number of answered calls, and of those that failed.
    pub(crate) calls: usize,
    pub(crate) failed: usize,
}

/// Reaction of the environment to a question.
pub(crate) enum Reaction {
    Said(Box<Said>),
    /// The answer exceeds a limit.
    TooLong,
    Stop,
}

/// Reply to a question.
pub(crate) struct Reply {
    pub(crate) place: (usize, usize),
    pub(crate) key: EpisodeKey,
    pub(crate) result: Result<(Box<dyn Episode>, Reaction), Cause>,
}

/// Questions that no thread has taken.
struct Queue<'a> {
    questions: Mutex<(VecDeque<Question<'a>>, bool)>,
    changed: Condvar,
}

impl<'a> Queue<'a> {
    fn questions(&self) -> MutexGuard<'_, (VecDeque<Question<'a>>, bool)> {
        self.questions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the next question; returns `None` after the end.
    fn take(&self) -> Option<Question<'a>> {
        let mut questions = self.questions();
        loop {
            if questions.1 {
                return None;
            }
            if let Some(next) = questions.0.pop_front() {
                return Some(next);
            }
            questions = self.changed.wait(questions).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// State that the threads of one rollout share.
pub(crate) struct Shared<'a> {
    queue: Queue<'a>,
    interaction: &'a Interaction,
    limits: &'a TurnLimits,
    prompts: &'a PromptBuilder,
}

impl<'a> Shared<'a> {
    pub(crate) fn new(
        interaction: &'a Interaction,
        limits: &'a TurnLimits,
        prompts: &'a PromptBuilder,
    ) -> Self {
        let questions = Mutex::new((VecDeque::new(), false));
        Self { queue: Queue { questions, changed: Condvar::new() }, interaction, limits, prompts }
    }
}

/// The threads that answer, for the thread that decodes.
pub(crate) struct Answers<'s, 'a> {
    shared: &'s Shared<'a>,
    replies: Receiver<Reply>,
    sender: Sender<Reply>,
    threads: usize,
    /// Number of questions without a reply.
    asked: usize,
}

impl Drop for Answers<'_, '_> {
    /// Ends the threads. Questions that no thread has taken are dropped.
    fn drop(&mut self) {
        self.shared.queue.questions().1 = true;
        self.shared.queue.changed.notify_all();
    }
}

impl<'s, 'a> Answers<'s, 'a> {
    pub(crate) fn new(shared: &'s Shared<'a>) -> Self {
        let (sender, replies) = channel();
        Self { shared, replies, sender, threads: 0, asked: 0 }
    }

    /// Hands a question to a thread.
    ///
    /// # Errors
    /// Returns an error if no thread can be started.
    pub(crate) fn ask<'e>(
        &mut self,
        scope: &'s Scope<'s, 'e>,
        question: Question<'a>,
    ) -> std::io::Result<()> {
        self.asked += 1;
        if self.threads < THREADS.min(self.asked) {
            let (shared, sender) = (self.shared, self.sender.clone());
            let work = move || {
                while let Some(question) = shared.queue.take() {
                    let (place, key) = (question.place, question.key);
                    let answered = guarded(|| answer(shared, question));
                    let result = answered.unwrap_or_else(|_| Err("it panicked".into()));
                    if sender.send(Reply { place, key, result }).is_err() {
                        break;
                    }
                }
            };
            match Builder::new().name("environment".to_owned()).spawn_scoped(scope, work) {
                Ok(_) => self.threads += 1,
                Err(error) if self.threads == 0 => return Err(error),
                Err(_) => {}
            }
        }
        self.shared.queue.questions().0.push_back(question);
        self.shared.queue.changed.notify_one();
        Ok(())
    }

    /// Returns the next reply. Waits for it if `waits`; otherwise returns `None` if none has arrived.
    pub(crate) fn next(&mut self, waits: bool) -> Option<Reply> {
        if self.asked == 0 {
            return None;
        }
        let reply = if waits {
            let before = Instant::now();
            let reply = self.replies.recv().ok();
            self.shared.interaction.add_wait(before.elapsed());
            reply
        } else {
            self.replies.try_recv().ok()
        };
        self.asked -= usize::from(reply.is_some());
        reply
    }
}

/// Asks the environment and builds its turn.
fn answer(shared: &Shared, question: Question) -> Result<(Box<dyn Episode>, Reaction), Cause> {
    let Shared { interaction, limits, prompts, .. } = shared;
    let Question { key, row, episode, text, ids, calls, number, tokens_left, .. } = question;
    let mut episode = match episode {
        Some(episode) => episode,
        None => interaction.environment.begin(row, key)?,
    };
    let tokens_left = limits.max_answer_tokens.map_or(tokens_left, |most| most.min(tokens_left));
    let media_left = limits.max_answer_media;
    let turn = ModelTurn { text: &text, ids: &ids, calls: &calls, number, tokens_left, media_left };
    let react = |answer| -> Result<Reaction, Cause> {
        let (role, parts, failed) = match answer {
            Answer::Stop => return Ok(Reaction::Stop),
            Answer::Say { role: Role::Assistant | Role::System, .. } => {
                return Err("it answered as the assistant or the system; expected a tool or a user".into());
            }
            Answer::Say { role, parts, failed } => (role, parts, failed),
        };
        let (said, sources) = conversation_turn(role, parts);
        if sources.len() > media_left {
            return Ok(Reaction::TooLong);
        }
        Ok(match prompts.turn(&said, &sources, tokens_left)? {
            Some(turn) => Reaction::Said(Box::new(Said { turn, said, sources, calls: calls.len(), failed })),
            None => Reaction::TooLong,
        })
    };
    let too_long = |cause: &Cause| matches!(cause.downcast_ref(), Some(ModelError::SaysTooMuch { .. }));
    let answer = match episode.answer(&turn) {
        Err(cause) if too_long(&cause) => return Ok((episode, Reaction::TooLong)),
        answer => answer?,
    };
    let shows = |part: &AnswerPart| matches!(part, AnswerPart::Medium { .. });
    let has_media = matches!(&answer, Answer::Say { parts, .. } if parts.iter().any(shows));
    let reaction = match react(answer) {
        Err(cause) if too_long(&cause) => Reaction::TooLong,
        // The model may have asked for a medium that does not exist: it reads why.
        Err(cause) if has_media && fault(&*cause, Fault::Row) == Fault::Row => {
            react(Answer::failed(&told(&*cause), calls.len()))?
        }
        reaction => reaction?,
    };
    Ok((episode, reaction))
}

/// Returns the parts of an answer as a turn of a conversation, and its media.
fn conversation_turn(role: Role, parts: Vec<AnswerPart>) -> (Turn, Vec<MediumRef>) {
    let mut sources: Vec<MediumRef> = Vec::new();
    let mut count = PerKind::<usize>::default();
    let part = |part| match part {
        AnswerPart::Text(text) => Part::Text(text),
        AnswerPart::Medium { kind, path } => {
            sources.push(AnswerPart::medium(kind, path));
            count[kind] += 1;
            Part::Medium { kind, index: count[kind] - 1 }
        }
    };
    let parts = parts.into_iter().map(part).collect();
    (Turn { role, parts }, sources)
}
