//! Runs that went well trigger no rule. `healthy/*.csv` are the metrics of `omnigrpo demo` with several seeds, of the runs of
//! `bench/learning` and of those of `examples/smollm2` and `examples/zoom`, with three digits;
//! `python3 tools/watch/healthy.py RUN_DIR "NAME LEAST BEST WEIGHT, …" > FILE` makes such a file.
use std::path::Path;

use omnigrpo_observe::{Metric, TrainingProblem};
use omnigrpo_train::{Aims, Health};

/// Returns the warnings of a run, and its number of steps. The first line names each reward with its range and weight.
fn told(text: &str) -> (Vec<(u64, TrainingProblem)>, u64) {
    let mut lines = text.lines();
    let (_, rewards) = lines.next().unwrap().rsplit_once(": ").unwrap();
    let mut aims = Aims { range: Some((0.0, 0.0)), ..Aims::default() };
    for reward in rewards.split(", ") {
        let words: Vec<&str> = reward.split(' ').collect();
        let [least, best, weight] = [1, 2, 3].map(|at| words[at].parse::<f64>().unwrap());
        aims.rewards.push((words[0].to_owned(), (least, best)));
        aims.range = aims.range.map(|(low, high)| (low + weight * least, high + weight * best));
    }
    let names: Vec<&str> = lines.next().unwrap().split(',').collect();
    let mut health = Health::new(aims);
    let (mut warnings, mut step) = (Vec::new(), 0);
    for line in lines {
        step += 1;
        let values = line.split(',').map(|value| value.parse().ok());
        let metrics: Vec<Metric> = names.iter().map(|name| (*name).to_owned()).zip(values).collect();
        warnings.extend(health.add(step, &metrics).into_iter().map(|own| (step, own)));
    }
    (warnings, step)
}

#[test]
fn runs_that_went_well_are_told_nothing() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/healthy");
    let (mut steps, mut runs) = (0, 0);
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let (mut warnings, own) = told(&std::fs::read_to_string(&path).unwrap());
        // A run that is solved has no problem.
        warnings.retain(|(_, own)| !own.good);
        assert_eq!(warnings, [], "{}", path.display());
        (steps, runs) = (steps + own, runs + 1);
    }
    assert_eq!((runs, steps), (13, 1200 + 3 * 60 + 2 * 30 + 100 + 79));
}

/// Adds a collapse behind the last step of the demo.
#[test]
fn a_collapse_at_the_end_of_such_a_run_is_told() {
    let text = include_str!("healthy/demo.csv");
    let names: Vec<&str> = text.lines().nth(1).unwrap().split(',').collect();
    let ruined = |name: &&str| match *name {
        "kl" => "9.5",
        "frac_reward_zero_std" | "completions/clipped_ratio" => "1",
        _ => "0",
    };
    let row = names.iter().map(ruined).collect::<Vec<_>>().join(",");
    let (warnings, _) = told(&format!("{text}{}", format!("{row}\n").repeat(30)));
    let found: Vec<_> = warnings.iter().map(|(step, own)| (*step, own.rule.as_str())).collect();
    assert_eq!(found, [(703, "ran_away")]);
}
