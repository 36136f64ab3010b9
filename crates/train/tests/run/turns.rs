//! Runs with an environment: what is recorded, and what a resumed run asks again.

use std::sync::atomic::AtomicUsize;

use omnigrpo_data::{Cause, MediumSource, Sample};
use omnigrpo_models::{Limits, Opening, Orientation};
use omnigrpo_rollout::{
    Answer, AnswerPart, Environment, Episode, EpisodeKey, Interaction, ModelTurn, TurnLimits,
};
use omnigrpo_text::{MediumKind, Part, Role};

use super::resume::sign;
use super::*;

/// Answers every turn with a picture and a text. Counts its answers.
#[derive(Clone)]
struct Shows {
    answers: Arc<AtomicUsize>,
    /// Folder for copies of the pictures, as environments of a run have it.
    folder: Option<PathBuf>,
    /// Picture of the row.
    own: Option<PathBuf>,
}

impl Environment for Shows {
    fn name(&self) -> &str {
        "shows"
    }

    fn answers_text(&self) -> bool {
        true
    }

    fn begin(&self, row: &Sample, _: EpisodeKey) -> Result<Box<dyn Episode>, Cause> {
        let own = row.media.iter().find_map(|medium| match &medium.source {
            MediumSource::Path(path) => Some(path.clone()),
            MediumSource::Frames(_) => None,
        });
        Ok(Box::new(Self { own, ..self.clone() }))
    }
}

impl Episode for Shows {
    fn answer(&mut self, turn: &ModelTurn<'_>) -> Result<Answer, Cause> {
        self.answers.fetch_add(1, Ordering::Relaxed);
        let mut path = golden(&format!("media/{}.png", ["shapes", "alpha"][turn.number % 2]));
        // About half of the answers show the picture of the row.
        if let Some(own) = self.own.as_ref().filter(|_| (turn.number + turn.ids.len()).is_multiple_of(2)) {
            path.clone_from(own);
        }
        if let Some(folder) = &self.folder {
            let picture = omnigrpo_media::load_image(&path, Orientation::default(), &Limits::default())?;
            path = omnigrpo_rollout::store_picture(folder, &picture)?;
        }
        let parts =
            vec![AnswerPart::Medium { kind: MediumKind::Image, path }, AnswerPart::Text("look".to_owned())];
        Ok(Answer::Say { role: Role::Tool, parts, failed: 0 })
    }
}

const MOST: usize = 140;

/// Lets an environment answer ten completions per prompt. Returns the number of its answers.
pub(super) fn interact(setup: &mut TrainSetup, folder: Option<PathBuf>) -> Arc<AtomicUsize> {
    let answers = Arc::new(AtomicUsize::new(0));
    let shows = Shows { answers: Arc::clone(&answers), folder, own: None };
    setup.interaction = Some(Interaction::new(Arc::new(shows)));
    setup.prompts = Arc::new(prompts(setup.model.dir(), MOST));
    setup.algorithm.num_generations = 10;
    // Nearly uniform draws end some turns of a random model.
    setup.algorithm.sampling = SamplingParams {
        max_completion_length: MOST,
        temperature: 8.0,
        logprob_temperature: Some(1.0),
        turns: Some(TurnLimits { max_turns: 2, ..TurnLimits::default() }),
        ..setup.algorithm.sampling.clone()
    };
    answers
}

/// Four updates from two rollouts, each for two updates.
fn interactive(place: &Place, name: &str) -> (TrainSetup, Arc<AtomicUsize>) {
    let mut setup = place.setup(name);
    setup.algorithm = algorithm(10, MOST);
    let answers = interact(&mut setup, Some(place.out(name).join("media")));
    setup.algorithm.loss.beta = 0.04;
    setup.algorithm.token_stats = true;
    setup.run.num_iterations = 2;
    setup.run.max_steps = Some(4);
    setup.run.save.when = SaveWhen::Steps(1);
    setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
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
    assert!(Path::new(turn["media"][0].as_str().unwrap()).starts_with(out.join("media")), "{turn}");
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
    // The turns show pictures of the prompts, which come first, and others.
    let state = std::fs::read(place.out("parts").join("checkpoint-3/trainer_state.json")).unwrap();
    let state: Value = serde_json::from_slice(&state).unwrap();
    let turns = state["buffer"]["turns"].as_array().unwrap().iter();
    let turns = turns.flat_map(|row| row.as_array().unwrap()).flat_map(|own| own.as_array().unwrap());
    let places: std::collections::BTreeSet<u64> = turns
        .flat_map(|turn| turn["media"].as_array().unwrap())
        .map(|place| place.as_u64().unwrap())
        .collect();
    assert!(places.contains(&0) && places.len() > 1, "{places:?}");
    let (setup, after) = interactive(&place, "parts");
    run(setup).unwrap();
    assert_eq!(after.load(Ordering::Relaxed), 0, "the second rollout is in the checkpoint");
    let weights = |name: &str| raw_tensors(&place.out(name).join("model.safetensors"));
    assert!(weights("parts") == weights("whole"));
}

/// Pictures of turns are found in a run directory that was moved.
#[test]
fn a_moved_run_resumes() {
    let place = Place::new();
    let (setup, _) = interactive(&place, "whole");
    run(setup).unwrap();
    let (mut setup, _) = interactive(&place, "here");
    setup.run.max_steps = Some(3);
    run(setup).unwrap();
    std::fs::rename(place.out("here"), place.out("there")).unwrap();
    let (setup, after) = interactive(&place, "there");
    run(setup).unwrap();
    assert_eq!(after.load(Ordering::Relaxed), 0);
    let weights = |name: &str| raw_tensors(&place.out(name).join("model.safetensors"));
    assert!(weights("there") == weights("whole"));
}

/// A checkpoint with impossible turns is refused with a message.
#[test]
fn impossible_turns_of_a_checkpoint_are_refused() {
    let place = Place::new();
    let new = || {
        let mut setup = interactive(&place, "run").0;
        setup.run.save.when = SaveWhen::Steps(1);
        setup
    };
    let mut first = new();
    first.run.max_steps = Some(1);
    run(first).unwrap();
    let one = place.out("run").join("checkpoint-1");
    let path = one.join("trainer_state.json");
    let state: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let turns = state["buffer"]["turns"].as_array().unwrap();
    let at = |row: usize| {
        turns[row].as_array().unwrap().iter().position(|own| !own.as_array().unwrap().is_empty())
    };
    let (row, completion) = (0..turns.len()).find_map(|row| Some((row, at(row)?))).unwrap();
    let turn = format!("/buffer/turns/{row}/{completion}/0");
    let picture = turns[row][completion][0]["parts"].as_array().unwrap();
    let picture = picture.iter().position(|part| part["image"].is_string()).unwrap();
    let tokens = |turn: &Value| turn["ids"].as_array().unwrap().len();
    let first = &turns[row][completion][0];
    assert!(tokens(first) > 4, "{first}");
    for (what, value, told_of) in [
        ("start".to_owned(), json!(0), "differ in length"),
        ("start".to_owned(), json!(u64::MAX), "differ in length"),
        ("ids".to_owned(), json!([1, 2, 3]), "differ in length"),
        ("spans".to_owned(), json!([[0, 0, 1u64 << 40]]), "a span is outside of the turn's tokens"),
        ("spans".to_owned(), json!([[0, u64::MAX, 2]]), "a span is outside of the turn's tokens"),
        ("spans".to_owned(), json!([[7, 0, 1]]), "a span is outside of the turn's tokens and media"),
        ("spans".to_owned(), json!([]), "its media have other sizes than before"),
        (
            "media".to_owned(),
            json!([1u64 << 60]),
            "the media of turns in its rollout in progress are incomplete",
        ),
        ("media".to_owned(), json!([]), "which has no place"),
        (format!("parts/{picture}/image"), json!("gone.png"), "gone.png"),
        (format!("parts/{picture}/image"), json!("/dev/zero"), "/dev/zero"),
    ] {
        let mut changed = state.clone();
        *changed.pointer_mut(&format!("{turn}/{what}")).unwrap() = value.clone();
        std::fs::write(&path, changed.to_string()).unwrap();
        sign(&one);
        let message = told(&run(new()).unwrap_err());
        assert!(message.contains(told_of), "{what} {value}: {message}");
    }
    std::fs::write(&path, state.to_string()).unwrap();
    sign(&one);
    assert_eq!(run(new()).unwrap().steps, 4);
}

/// The prompts of a rollout in progress are built again. An environment that opens their rows in another way ends the run.
#[test]
fn a_row_that_is_opened_in_another_way_is_refused() {
    let place = Place::new();
    let opened = |steps: u64, word: &'static str| {
        let mut setup = place.setup("run");
        let opening = Opening(Arc::new(move |row: &mut Sample| {
            row.turns.last_mut().unwrap().parts.push(Part::Text(word.to_owned()));
            Ok(())
        }));
        setup.prompts = Arc::new((*setup.prompts).clone().with_opening(opening));
        (setup.run.num_iterations, setup.run.max_steps) = (2, Some(steps));
        setup.run.save.when = SaveWhen::Steps(1);
        setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
        run(setup)
    };
    opened(3, "three").unwrap();
    let message = told(&opened(5, "seven").unwrap_err());
    assert!(
        message.contains("has another prompt than when its completions were sampled")
            && message.contains("an environment must open a row in the same way each time"),
        "{message}"
    );
    assert_eq!(opened(4, "three").unwrap().steps_here, 1);
    // Between two rollouts, rows may be opened in another way.
    assert_eq!(opened(5, "seven").unwrap().steps_here, 1);
}

#[test]
fn replay_and_an_environment_exclude_each_other() {
    let place = Place::new();
    let (mut setup, _) = interactive(&place, "run");
    setup.run.rows.replay = true;
    let told = told(&run(setup).unwrap_err());
    assert!(told.contains("an environment cannot answer recorded completions"), "{told}");
}
