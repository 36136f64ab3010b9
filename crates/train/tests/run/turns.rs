//! Runs with an environment: what is recorded, and what a resumed run asks again.

use std::sync::atomic::AtomicUsize;

use omnigrpo_data::{Cause, Sample};
use omnigrpo_rollout::{Answer, AnswerPart, Environment, Episode, EpisodeKey, Interaction, ModelTurn};
use omnigrpo_text::{MediumKind, Role};

use super::*;

/// Answers every turn with a picture and a text. Counts its answers.
struct Shows {
    answers: Arc<AtomicUsize>,
}

impl Environment for Shows {
    fn name(&self) -> &str {
        "shows"
    }

    fn answers_text(&self) -> bool {
        true
    }

    fn begin(&self, _: &Sample, _: EpisodeKey) -> Result<Box<dyn Episode>, Cause> {
        Ok(Box::new(Self { answers: Arc::clone(&self.answers) }))
    }
}

impl Episode for Shows {
    fn answer(&mut self, turn: &ModelTurn<'_>) -> Result<Answer, Cause> {
        self.answers.fetch_add(1, Ordering::Relaxed);
        let path = golden(&format!("media/{}.png", ["shapes", "alpha"][turn.number % 2]));
        let parts =
            vec![AnswerPart::Medium { kind: MediumKind::Image, path }, AnswerPart::Text("look".to_owned())];
        Ok(Answer::Say { role: Role::Tool, parts, failed: 0 })
    }
}

const MOST: usize = 140;

/// Four updates from two rollouts, each for two updates.
fn interactive(place: &Place, name: &str) -> (TrainSetup, Arc<AtomicUsize>) {
    let mut setup = place.setup(name);
    let answers = Arc::new(AtomicUsize::new(0));
    let mut interaction = Interaction::new(Arc::new(Shows { answers: Arc::clone(&answers) }));
    interaction.max_turns = 2;
    setup.prompts = Arc::new(prompts(&checkpoint(NAME), MOST));
    setup.algorithm = algorithm(10, MOST);
    // Nearly uniform draws end some turns of a random model.
    setup.algorithm.sampling = SamplingParams {
        temperature: 8.0,
        logprob_temperature: Some(1.0),
        interaction: Some(interaction),
        ..setup.algorithm.sampling
    };
    setup.algorithm.loss.beta = 0.04;
    setup.algorithm.token_stats = true;
    setup.run.num_iterations = 2;
    setup.run.max_steps = Some(4);
    setup.run.save = SaveWhen::Steps(1);
    setup.run.schedule = omnigrpo_train::ScheduleKind::Constant;
    (setup, answers)
}

/// The rollout's log-probabilities are those of training, and the records have every turn.
#[test]
fn turns_are_trained_and_recorded() {
    let place = Place::new();
    let (setup, answers) = interactive(&place, "run");
    run(setup).unwrap();
    let out = place.out("run");
    let metrics = lines(&out.join("metrics.jsonl"));
    assert_eq!(metrics.len(), 4);
    let first = &metrics[0];
    assert!(number(first, "sampling/sampling_logp_difference/max") <= 1e-4, "{first}");
    let rollouts: Vec<Value> =
        [1, 3].iter().flat_map(|step| lines(&out.join(format!("rollouts/step-{step:06}.jsonl")))).collect();
    assert_eq!(rollouts.len(), 40);
    let turns = |row: &Value| row["turns"].as_array().map_or(0, Vec::len);
    let all: usize = rollouts.iter().map(turns).sum();
    // The other answers did not fit.
    let asked = answers.load(Ordering::Relaxed);
    assert!((2..=asked).contains(&all), "{all} turns, {asked} answers");
    let of_first: usize = rollouts[..20].iter().map(turns).sum();
    assert_eq!(number(first, "turns/mean"), 1.0 + of_first as f64 / 20.0);
    assert_eq!(number(first, "tools/call_frequency"), 0.0, "the texts call no tool");
    let with = rollouts.iter().find(|row| turns(row) > 0).unwrap();
    let turn = &with["turns"][0];
    assert_eq!(turn["text"], "look");
    assert!(turn["media"][0].as_str().unwrap().ends_with("alpha.png"), "{turn}");
    assert!(number(turn, "model_tokens") >= 1.0 && number(turn, "tokens") > 4.0, "{turn}");
    assert!(number(with, "length") + number(turn, "tokens") <= MOST as f64);
}

/// A run that is resumed between two updates of a rollout does not ask the environment for that rollout again, and gives the same
/// weights.
#[test]
fn a_resumed_run_does_not_ask_again() {
    let place = Place::new();
    let (setup, whole) = interactive(&place, "whole");
    run(setup).unwrap();
    let (mut setup, before) = interactive(&place, "parts");
    setup.run.max_steps = Some(3);
    run(setup).unwrap();
    assert_eq!(before.load(Ordering::Relaxed), whole.load(Ordering::Relaxed), "both rollouts were sampled");
    let (setup, after) = interactive(&place, "parts");
    run(setup).unwrap();
    assert_eq!(after.load(Ordering::Relaxed), 0, "the second rollout is in the checkpoint");
    let weights = |name: &str| raw_tensors(&place.out(name).join("model.safetensors"));
    assert!(weights("parts") == weights("whole"));
}

#[test]
fn replay_and_an_environment_exclude_each_other() {
    let place = Place::new();
    let (mut setup, _) = interactive(&place, "run");
    setup.run.replay = true;
    let told = told(&run(setup).unwrap_err());
    assert!(
        told.contains("an environment cannot answer completions over several ranks or in a replay"),
        "{told}"
    );
}
