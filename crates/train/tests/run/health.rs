//! Runs that go wrong say so: each rule of [`RULES`](omnigrpo_train::RULES) is met by a run of the demo's checkpoint.

use omnigrpo_rewards::reward as scored;
use omnigrpo_train::RunSummary;

use super::*;

/// A run of the demo's checkpoint, which ends its completions, with this reward.
fn setup(place: &Place, name: &str, rewards: Vec<Box<dyn Reward>>, steps: u64) -> TrainSetup {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../demo/assets/model");
    let mut setup = place.setup(name);
    setup.model = omnigrpo_testkit::load(&dir, WeightDtype::Float32).unwrap();
    setup.prompts = Arc::new(prompts(&dir, 24));
    setup.algorithm = algorithm(4, 24);
    setup.rewards = RewardSet::new(rewards, &[]).unwrap();
    setup.optimizer.learning_rate = 0.0;
    setup.run.max_steps = Some(steps);
    setup
}

fn warnings(place: &Place, name: &str) -> Vec<(u64, String, bool)> {
    let told = |row: &Value| {
        let text = |key: &str| row[key].as_str().unwrap().to_owned();
        (row["step"].as_u64().unwrap(), text("rule"), row["begins"].as_bool().unwrap())
    };
    problems(place, name).iter().map(told).collect()
}

/// Training problems among the events of a run, without their time.
fn problems(place: &Place, name: &str) -> Vec<Value> {
    let mut events = lines(&place.out(name).join("events.jsonl"));
    events.retain_mut(|row| {
        row.as_object_mut().unwrap().remove("time").unwrap();
        row["kind"] == "problem"
    });
    events
}

fn begins(step: u64, rule: &str) -> (u64, String, bool) {
    (step, rule.to_owned(), true)
}

/// A number from 0 to 1 that differs between completions.
fn varied(text: &str) -> f64 {
    let sum = text.bytes().enumerate().map(|(at, byte)| (at as u64 + 1) * u64::from(byte)).sum::<u64>();
    (sum % 7) as f64 / 6.0
}

const UNIT: (f64, f64) = (0.0, 1.0);

#[test]
fn rewards_that_say_nothing_are_told_apart() {
    let place = Place::new();
    let constant = |value: f64| scored("same", UNIT, move |_| value);
    let by_row = || scored("by row", UNIT, |row| f64::from(row.prompt.len() % 2 == 0));
    // One completion earns something, so the reward is not dead.
    let once = || {
        let given = std::sync::atomic::AtomicBool::new(false);
        scored("once", UNIT, move |row| {
            // The checks before a run score an empty completion.
            f64::from(!row.completion.is_empty() && !given.swap(true, std::sync::atomic::Ordering::Relaxed))
        })
    };
    for (name, reward, step, rule) in [
        ("solved", constant(1.0), 10, "solved"),
        ("hopeless", once(), 11, "hopeless"),
        ("dead", constant(0.0), DEAD_AT, "dead_reward"),
        ("middling", constant(0.5), DEAD_AT, "dead_reward"),
        ("by row", by_row(), 10, "no_variance"),
    ] {
        run(setup(&place, name, vec![reward], 12)).unwrap();
        let told: Vec<_> = warnings(&place, name).into_iter().filter(|own| own.1 == rule).collect();
        assert_eq!(told, [begins(step, rule)], "{name}");
    }
    let text = problems(&place, "dead")[0]["text"].as_str().unwrap().to_owned();
    assert!(text.starts_with("every completion has the same reward"), "{text}");
    assert!(text.contains("`same` gave 0 to all 64 completions"), "{text}");
    assert!(
        text.contains("TrainSetup::rewards") && text.ends_with("No checkpoint precedes the problem"),
        "{text}"
    );
    assert!(problems(&place, "solved")[0]["good"].as_bool().unwrap(), "it is no problem");
}

/// Step at which these runs have 64 completions.
const DEAD_AT: u64 = 8;

#[test]
fn a_reward_that_never_fires_is_named() {
    let place = Place::new();
    let rewards = vec![scored("varied", UNIT, |row| varied(row.completion)), scored("format", UNIT, |_| 0.0)];
    run(setup(&place, "run", rewards, 21)).unwrap();
    assert_eq!(warnings(&place, "run"), [begins(20, "reward_never_fires")]);
    let row = &problems(&place, "run")[0];
    assert!(row["text"].as_str().unwrap().contains("`format` gave every completion 0."), "{row}");
}

#[test]
fn completions_that_are_cut_off_are_told_with_the_limit_to_raise() {
    let place = Place::new();
    let mut cut = setup(&place, "run", vec![scored("varied", UNIT, |row| varied(row.completion))], 6);
    cut.algorithm = algorithm(4, 2);
    run(cut).unwrap();
    assert_eq!(warnings(&place, "run"), [begins(5, "cut_off")]);
    let row = &problems(&place, "run")[0];
    assert!(
        row["text"].as_str().unwrap().contains("100 % of them reach the length limit, at 2 tokens"),
        "{row}"
    );
}

/// A run whose rate is far too high from step 7 on: the model forgets how to close its answer.
fn away(place: &Place, name: &str, stop_on_collapse: bool) -> RunSummary {
    let start = |steps: u64, learning_rate: f64| {
        let closed = scored("closed", UNIT, |row| {
            0.9 * f64::from(row.completion.ends_with("</answer>")) + 0.1 * varied(row.completion)
        });
        let mut setup = setup(place, name, vec![closed], steps);
        setup.optimizer.learning_rate = learning_rate;
        setup.run.save.when = SaveWhen::Steps(2);
        setup.run.save.limit = Some(3);
        setup.run.resume.allow_changed = true;
        setup.run.stop_on_collapse = stop_on_collapse;
        run(setup).unwrap()
    };
    if !place.out(name).join("checkpoint-6").exists() {
        start(6, 0.0);
    }
    start(18, 0.5)
}

#[test]
fn a_policy_that_runs_away_is_told_and_the_checkpoint_before_it_stays() {
    let place = Place::new();
    let summary = away(&place, "run", false);
    let told = warnings(&place, "run");
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!((told[0].1.as_str(), summary.collapsed, summary.steps), ("ran_away", None, 18));
    let row = &problems(&place, "run")[0];
    let text = row["text"].as_str().unwrap();
    assert!(
        text.contains("the mean reward fell from ") && text.contains("Lower AdamWConfig::learning_rate"),
        "{text}"
    );
    let good = place.out("run").join("checkpoint-4");
    assert!(
        text.ends_with(&format!("The last checkpoint before the problem is {}", good.display())),
        "{text}"
    );
    // Three are kept, and the one that the warning names.
    assert_eq!(
        checkpoints(&place.out("run")),
        ["checkpoint-14", "checkpoint-16", "checkpoint-18", "checkpoint-4"]
    );
}

#[test]
fn a_run_that_is_to_stop_on_collapse_ends_with_a_checkpoint_and_goes_on_no_further() {
    let place = Place::new();
    let summary = away(&place, "run", true);
    let at = warnings(&place, "run")[0].0;
    assert_eq!((summary.steps, summary.interrupted), (at, true));
    let collapsed = summary.collapsed.unwrap();
    assert!(collapsed.starts_with("the policy ran away (since step "), "{collapsed}");
    assert!(checkpoints(&place.out("run")).contains(&format!("checkpoint-{at}")));
    // Started again it still is where it was.
    assert_eq!(away(&place, "run", true).steps, at + 1);
    assert_eq!(warnings(&place, "run").len(), 1, "what was told is not told again");
}

#[test]
fn a_checkpoint_that_another_thread_asks_for_is_written_once() {
    let place = Place::new();
    let mut setup = setup(&place, "run", vec![scored("same", UNIT, |_| 0.0)], 3);
    setup.run.save.when = SaveWhen::Never;
    let asked = std::sync::Arc::clone(&setup.signals.save);
    asked.store(true, std::sync::atomic::Ordering::Relaxed);
    run(setup).unwrap();
    assert_eq!(checkpoints(&place.out("run")), ["checkpoint-1"]);
    assert!(!asked.load(std::sync::atomic::Ordering::Relaxed));
}

#[test]
fn a_resumed_run_tells_what_an_uninterrupted_one_tells() {
    let place = Place::new();
    let start = |name: &str, stop_at: Option<u64>| {
        let mut setup = setup(&place, name, vec![scored("same", UNIT, |_| 0.0)], 14);
        setup.observer = Box::new(StopAt(stop_at));
        run(setup).unwrap()
    };
    start("whole", None);
    for at in [6, 11] {
        let name = format!("part-{at}");
        assert!(start(&name, Some(at)).interrupted);
        start(&name, None);
        assert_eq!(problems(&place, &name), problems(&place, "whole"));
    }
}

struct StopAt(Option<u64>);

impl Observer for StopAt {
    fn step(&mut self, step: u64, _: &[Metric]) -> ControlFlow<()> {
        if self.0 == Some(step) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}

/// The policy is pushed to one answer, whatever it earns.
#[test]
fn an_entropy_that_collapses_is_told() {
    let place = Place::new();
    let rewards = vec![scored("varied", (0.0, 10.0), |row| varied(row.completion))];
    let mut sure = setup(&place, "run", rewards, 40);
    sure.optimizer.learning_rate = 3e-4;
    sure.algorithm.loss.entropy_coef = -1.0;
    sure.algorithm.loss.beta = 0.0;
    run(sure).unwrap();
    let told = warnings(&place, "run");
    let rules: Vec<&str> =
        told.iter().filter(|(.., begins)| *begins).map(|(_, rule, _)| rule.as_str()).collect();
    assert_eq!(rules, ["no_variance", "entropy_collapsed"]);
}
