//! `events.jsonl` has what happened, once, in order, and a resumed run continues it.

use omnigrpo_observe::Event;
use omnigrpo_rewards::reward as scored;

use super::*;

/// Kind and step of each event, without their time, which all have.
fn told(place: &Place) -> Vec<(String, u64)> {
    let kind = |row: &Value| {
        assert!(row["time"].as_str().unwrap().ends_with('Z'), "{row}");
        (row["kind"].as_str().unwrap().to_owned(), row["step"].as_u64().unwrap())
    };
    lines(&place.out("run").join("events.jsonl")).iter().map(kind).collect()
}

fn named(events: &[(&str, u64)]) -> Vec<(String, u64)> {
    events.iter().map(|(kind, step)| ((*kind).to_owned(), *step)).collect()
}

/// Stops a run after a step, and keeps its events.
struct Listener(Option<u64>, Arc<Mutex<Vec<String>>>);

impl Observer for Listener {
    fn step(&mut self, step: u64, _: &[Metric]) -> ControlFlow<()> {
        if self.0 == Some(step) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
    fn event(&mut self, step: u64, event: &Event) {
        self.1.lock().unwrap().push(event.line(step));
    }
}

#[test]
fn events_are_recorded_once_and_a_resumed_run_continues_them() {
    let place = Place::new();
    let start = |stop_at: Option<u64>, reward: f64| {
        let mut setup = place.setup("run");
        setup.run.max_steps = Some(4);
        setup.run.save.when = SaveWhen::Steps(2);
        setup.eval = Some(greedy_eval(&setup));
        setup.rewards = RewardSet::new(vec![scored("same", (0.0, 1.0), move |_| reward)], &[]).unwrap();
        let heard = Arc::default();
        setup.observer = Box::new(Listener(stop_at, Arc::clone(&heard)));
        let console = Console::plain(std::io::sink());
        console.warning("before the start");
        console.log_to(&place.out("log.txt")).unwrap();
        let outcome = train(setup, &console, &AtomicBool::new(false));
        // The record of this run is over.
        console.warning("after the end");
        let heard: Vec<String> = heard.lock().unwrap().clone();
        (outcome.map(|trained| trained.summary), heard)
    };
    let (stopped, heard) = start(Some(3), 0.5);
    assert!(stopped.unwrap().interrupted);
    let first = [("warning", 0), ("started", 0), ("checkpoint", 2), ("checkpoint", 3), ("stopped", 3)];
    assert_eq!(told(&place), named(&first));
    // The observer hears what the loop tells, and the log has the same lines.
    let log = std::fs::read_to_string(place.out("log.txt")).unwrap();
    let at = |step: u64| format!("saved {}", place.out("run").join(format!("checkpoint-{step}")).display());
    assert_eq!(
        heard,
        ["starting a run of 4 steps".to_owned(), at(2), at(3), "stopped after step 3".to_owned()]
    );
    assert!(heard[1..].iter().all(|line| log.matches(&format!(" {line}\n")).count() == 1), "{log}");

    // The failure at step 4 is after the checkpoint from which the next start resumes, so only the log keeps it.
    let (failed, _) = start(None, f64::NAN);
    let failure = failed.unwrap_err().to_string();
    let rows = lines(&place.out("run").join("events.jsonl"));
    let last = rows.last().unwrap();
    assert_eq!((last["kind"].as_str(), last["step"].as_u64()), (Some("failed"), Some(3)));
    assert!(last["why"].as_str().unwrap().starts_with(&failure), "{last}");
    let (finished, _) = start(None, 0.5);
    assert_eq!(finished.unwrap().steps, 4);
    let mut all = told(&place);
    all.retain(|(kind, _)| !["warning", "problem"].contains(&kind.as_str()));
    let whole = [
        ("started", 0),
        ("checkpoint", 2),
        ("checkpoint", 3),
        ("stopped", 3),
        ("resumed", 3),
        ("failed", 3),
        ("resumed", 3),
        ("evaluation", 4),
        ("checkpoint", 4),
        ("finished", 4),
    ];
    assert_eq!(all, named(&whole));
    let rows = lines(&place.out("run").join("events.jsonl"));
    let evaluation = rows.iter().find(|row| row["kind"] == "evaluation").unwrap();
    assert_eq!(evaluation["metrics"]["eval_reward"], 0.5);
    let resumed = rows.iter().find(|row| row["kind"] == "resumed").unwrap();
    assert_eq!(
        (&resumed["num_steps"], resumed["checkpoint"].as_str().unwrap().ends_with("checkpoint-3")),
        (&4.into(), true)
    );
}
