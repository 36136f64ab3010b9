//! Starting again: what goes on, what is set aside, what is refused.

use std::io::Write;
use std::sync::Mutex;
use std::time::Duration;

use omnigrpo_guard::told;
use omnigrpo_observe::RunLock;
use omnigrpo_train::{RunSummary, checkpoint};
use sha2::{Digest, Sha256};

use super::*;

/// Text of the console.
#[derive(Clone, Default)]
struct Screen(Arc<Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Runs with a console whose text comes back.
fn shown(setup: TrainSetup) -> (Result<RunSummary, TrainError>, String) {
    let screen = Screen::default();
    let result =
        train(setup, &Console::plain(screen.clone()), &AtomicBool::new(false)).map(|trained| trained.summary);
    let text = String::from_utf8(screen.0.lock().unwrap().clone()).unwrap();
    (result, text)
}

/// Writes the sums of a checkpoint anew, as one would have to who changes it on purpose.
pub fn sign(checkpoint: &Path) {
    std::fs::remove_file(checkpoint.join("SHA256SUMS")).unwrap();
    let line = |name: String| {
        let sum = Sha256::digest(std::fs::read(checkpoint.join(&name)).unwrap());
        format!("{}  {name}\n", sum.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
    };
    let sums: String = names(checkpoint).into_iter().map(line).collect();
    std::fs::write(checkpoint.join("SHA256SUMS"), sums).unwrap();
}

fn flip_last_bit(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
}

fn steps(dir: &Path) -> Vec<f64> {
    lines(&dir.join("metrics.jsonl")).iter().map(|row| number(row, "step")).collect()
}

fn evaluated(place: &Place, name: &str) -> TrainSetup {
    let mut setup = place.setup(name);
    setup.eval = Some(greedy_eval(&setup));
    setup.run.eval.when = EvalWhen::Steps(2);
    setup.run.save.when = SaveWhen::Steps(2);
    setup.run.max_steps = Some(4);
    setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
    setup
}

#[test]
fn a_directory_has_one_run_at_a_time() {
    let place = Place::new();
    let first = place.setup("run");
    let refused = told(&RunLock::acquire(&place.out("run"), "another").unwrap_err());
    assert!(refused.contains("in use by this test"), "{refused}");
    drop(first);
    RunLock::acquire(&place.out("run"), "another").unwrap();
}

#[test]
fn a_run_without_a_checkpoint_is_set_aside_and_not_overwritten() {
    let place = Place::new();
    let out = place.out("run");
    let with = |steps: u64, name: &str| {
        let mut setup = evaluated(&place, "run");
        setup.run.max_steps = Some(steps);
        setup.run.save.when = SaveWhen::Never;
        setup.run.records.files = vec![("config.yaml", name.as_bytes().to_vec())];
        shown(setup)
    };
    let (_, text) = with(2, "first");
    assert!(!text.contains("superseded"), "{text}");
    let kept = ["metrics.jsonl", "model.safetensors", "config.yaml", "README.md", "eval/step-000002.jsonl"];
    let before: Vec<Vec<u8>> = kept.iter().map(|name| std::fs::read(out.join(name)).unwrap()).collect();
    let (result, text) = with(1, "second");
    result.unwrap();
    assert!(text.contains("the files of the earlier run in ") && text.contains("superseded-1"), "{text}");
    assert!(text.contains("it left no checkpoint to resume from; starting from the beginning"), "{text}");
    let aside = out.join("superseded-1");
    for (name, bytes) in kept.iter().zip(before) {
        assert!(std::fs::read(aside.join(name)).unwrap() == bytes, "{name}");
    }
    assert_eq!(names(&aside.join("rollouts")).len(), 2);
    assert_eq!(steps(&out), [1.0, 1.0], "a step and its evaluation");
    assert!(!out.join("eval/step-000002.jsonl").exists());
    // A start that fails before its first step leaves nothing that is worth a directory.
    let mut broken = place.setup("other");
    broken.run.rows.bad = (0..6).map(|row| (row, format!("row {row}"), "bad".to_owned())).collect();
    run(broken).unwrap_err();
    let (_, text) = shown(place.setup("other"));
    assert!(!text.contains("superseded"), "{text}");
}

#[test]
fn a_model_that_no_run_made_is_left_alone() {
    let place = Place::new();
    let file = place.out("run").join("model.safetensors");
    std::fs::create_dir(place.out("run")).unwrap();
    std::fs::write(&file, "somebody's").unwrap();
    let message = told(&run(place.setup("run")).unwrap_err());
    assert!(
        message.contains("the directory contains a model (model.safetensors) that no run wrote"),
        "{message}"
    );
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "somebody's");
}

/// Files that a user keeps in a run's directory stay. The run moves and does not overwrite those whose names it writes.
#[test]
fn files_of_the_user_are_neither_taken_nor_overwritten() {
    let place = Place::new();
    let out = place.out("run");
    std::fs::create_dir(&out).unwrap();
    for name in
        ["my_rewards.py", "README.md", "config.yaml", "notes.txt", "mine.safetensors", "checkpoint-notes.txt"]
    {
        std::fs::write(out.join(name), "somebody's").unwrap();
    }
    let with = |steps: u64| {
        let mut setup = place.setup("run");
        setup.run.max_steps = Some(steps);
        setup.run.save.when = SaveWhen::Never;
        setup.run.records.files = vec![("config.yaml", b"# omnigrpo train\n".to_vec())];
        shown(setup)
    };
    let (result, text) = with(1);
    result.unwrap();
    assert!(text.contains("files that no run wrote in "), "{text}");
    assert!(
        text.contains("superseded-1: README.md, config.yaml; this run writes files with these names"),
        "{text}"
    );
    let aside = out.join("superseded-1");
    assert_eq!(names(&aside).into_iter().collect::<Vec<_>>(), ["README.md", "config.yaml"]);
    assert_eq!(std::fs::read_to_string(aside.join("config.yaml")).unwrap(), "somebody's");
    // A second run sets the first aside, and again nothing else.
    let (result, _) = with(1);
    result.unwrap();
    let again = names(&out.join("superseded-2"));
    assert!(again.iter().any(|name| name == "model.safetensors"), "{again:?}");
    for name in ["my_rewards.py", "notes.txt", "mine.safetensors", "checkpoint-notes.txt"] {
        assert_eq!(std::fs::read_to_string(out.join(name)).unwrap(), "somebody's", "{name}");
    }
}

#[test]
fn a_checkpoint_that_was_copied_in_part_is_passed_over_aloud() {
    let place = Place::new();
    let out = place.out("run");
    let with = |steps: u64| {
        let mut setup = place.setup("run");
        (setup.run.max_steps, setup.run.save.when) = (Some(steps), SaveWhen::Steps(2));
        setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
        shown(setup)
    };
    with(4).0.unwrap();
    std::fs::remove_file(out.join("checkpoint-4/trainer_state.json")).unwrap();
    let (result, text) = with(4);
    assert_eq!(result.unwrap().steps_here, 2, "{text}");
    assert!(text.contains("checkpoint-4 is ignored: it contains no trainer_state.json"), "{text}");
    // The steps that are made again do not overwrite what is left of it.
    assert!(out.join("superseded-1/checkpoint-4/model.safetensors").is_file(), "{text}");
    assert_eq!(checkpoints(&out), ["checkpoint-2", "checkpoint-4"]);
    assert!(!with(6).1.contains("passed over"));
}

#[test]
fn nothing_moves_before_a_checkpoint_has_been_loaded() {
    let place = Place::new();
    let out = place.out("run");
    let with = |steps: u64| {
        let mut setup = place.setup("run");
        (setup.run.max_steps, setup.run.save.when) = (Some(steps), SaveWhen::Steps(2));
        setup
    };
    run(with(6)).unwrap();
    let model = out.join("checkpoint-2/model.safetensors");
    let whole = std::fs::read(&model).unwrap();
    std::fs::write(&model, &whole[..9999]).unwrap();
    let before = (names(&out), std::fs::read(out.join("metrics.jsonl")).unwrap());
    let from_two = |steps: u64| {
        let mut setup = with(steps);
        setup.run.resume.from = ResumeFrom::Path(out.join("checkpoint-2"));
        setup
    };
    let message = told(&run(from_two(8)).unwrap_err());
    assert!(
        message.contains("checkpoint-2 is damaged: model.safetensors has changed since it was saved"),
        "{message}"
    );
    assert!((names(&out), std::fs::read(out.join("metrics.jsonl")).unwrap()) == before);

    // Repaired, it is gone on from, and everything that came after it is kept.
    std::fs::write(&model, whole).unwrap();
    let (result, text) = shown(from_two(4));
    assert_eq!(result.unwrap().steps, 4);
    assert!(text.contains("superseded-1: the run resumes from an earlier checkpoint"), "{text}");
    let aside = out.join("superseded-1");
    assert_eq!(checkpoints(&aside), ["checkpoint-4", "checkpoint-6"]);
    assert_eq!(names(&aside.join("rollouts")).len(), 4);
    assert_eq!(steps(&aside).len(), 6);
    assert!(aside.join("model.safetensors").exists());
    assert_eq!(steps(&out), [1.0, 2.0, 3.0, 4.0]);
}

#[test]
fn a_flipped_bit_is_found_and_the_checkpoint_before_it_taken() {
    let place = Place::new();
    let new = |name: &str, steps: u64| {
        let mut setup = place.setup(name);
        (setup.run.max_steps, setup.run.save.when) = (Some(steps), SaveWhen::Steps(2));
        setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
        setup
    };
    run(new("whole", 6)).unwrap();
    run(new("start", 4)).unwrap();
    let whole = raw_tensors(&place.out("whole/model.safetensors"));
    type Damage = fn(&std::path::Path);
    let mut cases: Vec<(&str, Damage)> =
        ["model.safetensors", "optimizer.safetensors", "trainer_state.json", "SHA256SUMS", "config.json"]
            .map(|file| (file, flip_last_bit as Damage))
            .into();
    // A file that has no end is not read to it.
    #[cfg(unix)]
    for file in ["model.safetensors", "SHA256SUMS"] {
        cases.push((file, |path| {
            std::fs::remove_file(path).unwrap();
            std::os::unix::fs::symlink("/dev/zero", path).unwrap();
        }));
    }
    for (number, (file, damage)) in cases.into_iter().enumerate() {
        let name = format!("cut-{number}");
        let out = place.out(&name);
        for part in ["checkpoint-2", "checkpoint-4", "rollouts"] {
            omnigrpo_testkit::copy_dir(&place.out("start").join(part), &out.join(part));
        }
        for log in ["metrics.jsonl", "skipped.jsonl"] {
            std::fs::copy(place.out("start").join(log), out.join(log)).unwrap();
        }
        damage(&out.join("checkpoint-4").join(file));
        let (result, text) = shown(new(&name, 6));
        assert_eq!(result.unwrap().steps_here, 4, "{file}: {text}");
        assert!(
            text.contains("checkpoint-4 is damaged: ") && text.contains("at step 2 of 6"),
            "{file}: {text}"
        );
        assert_eq!(checkpoints(&out.join("superseded-1")), ["checkpoint-4"], "{file}");
        assert!(raw_tensors(&out.join("model.safetensors")) == whole, "{file}");
        assert_eq!(timeless(&out), timeless(&place.out("whole")), "{file}");
    }
    // Where none is left, that is an error and nothing is moved.
    let out = place.out("start");
    for name in ["checkpoint-2", "checkpoint-4"] {
        flip_last_bit(&out.join(name).join("model.safetensors"));
    }
    let before = names(&out);
    let message = told(&run(new("start", 6)).unwrap_err());
    assert!(message.contains("checkpoint-4 is damaged"), "{message}");
    assert_eq!(names(&out), before);
}

#[test]
fn moments_and_states_that_cannot_be_are_refused() {
    let place = Place::new();
    let out = place.out("run");
    let new = || {
        let mut setup = place.setup("run");
        setup.run.save.when = SaveWhen::Steps(1);
        setup
    };
    let mut first = new();
    first.run.max_steps = Some(1);
    run(first).unwrap();
    let one = out.join("checkpoint-1");
    let refused = |what: &str| {
        sign(&one);
        let message = told(&run(new()).unwrap_err());
        assert!(message.contains("checkpoint-1") && message.contains(what), "{what}: {message}");
        assert_eq!(names(&out), names(&out).into_iter().filter(|n| !n.starts_with("superseded")).collect());
    };

    let moments = one.join("optimizer.safetensors");
    let whole = std::fs::read(&moments).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let tensors: Value = serde_json::from_slice(&whole[8..header]).unwrap();
    for (suffix, value) in [(".v", -1f32), (".v", f32::NAN), (".m", f32::INFINITY)] {
        let (name, entry) = tensors.as_object().unwrap().iter().find(|(n, _)| n.ends_with(suffix)).unwrap();
        let at = header + entry["data_offsets"][0].as_u64().unwrap() as usize;
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        std::fs::write(&moments, bytes).unwrap();
        refused(&format!("optimizer.safetensors: tensor {name}: element 0 is {value}"));
    }
    std::fs::write(&moments, &whole).unwrap();

    let path = one.join("trainer_state.json");
    let state: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let with = |key: &str, value: Value| {
        let mut changed = state.clone();
        changed[key] = value;
        std::fs::write(&path, changed.to_string()).unwrap();
    };
    with("global_step", json!(1u64 << 63));
    refused("it is from step 9223372036854775808");
    with("optimizer_steps", json!({}));
    refused("tensors, expected 0 for the weights listed in trainer_state.json");
    with("rollout", json!(7));
    refused("exceeds step 1");
    with("order", json!({ "epoch": 0, "index": 99, "skipped": [] }));
    sign(&one);
    let message = told(&run(new()).unwrap_err());
    assert!(message.contains("saved data position is index 99, but the epoch has 6 rows"), "{message}");
    assert_eq!(steps(&out), [1.0], "the logs are as they were");
    std::fs::write(&path, state.to_string()).unwrap();
    sign(&one);
    assert_eq!(run(new()).unwrap().steps, 6);
}

/// A rollout in progress that does not fit the run is an error that says so.
#[test]
fn a_rollout_in_progress_that_does_not_fit_is_refused() {
    let place = Place::new();
    let one = place.out("run").join("checkpoint-1");
    let new = |steps: u64| {
        let mut setup = place.setup("run");
        (setup.run.num_iterations, setup.run.max_steps) = (2, Some(steps));
        setup.run.save.when = SaveWhen::Steps(1);
        setup
    };
    run(new(1)).unwrap();
    let path = one.join("trainer_state.json");
    let state: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let refused = |change: &dyn Fn(&mut Value), what: &str| {
        let mut changed = state.clone();
        change(&mut changed["buffer"]);
        std::fs::write(&path, changed.to_string()).unwrap();
        sign(&one);
        let mut setup = new(2);
        setup.run.resume.from = ResumeFrom::Path(one.clone());
        let message = told(&run(setup).unwrap_err());
        assert!(message.contains(what), "{what}: {message}");
        assert!(one.is_dir());
    };
    for iteration in [2, u64::MAX] {
        refused(
            &|buffer| buffer["iteration"] = json!(iteration),
            &format!("had {iteration} updates, expected less than 2"),
        );
    }
    refused(&|buffer| buffer["rows"][0] = json!(u64::MAX), "can no longer be read");
    refused(&|buffer| buffer["ids"][0][0][0] = json!(u32::MAX), "outside the vocabulary");
    refused(&|buffer| buffer["ids"][0] = json!([]), "differ in length");
    let empty = |buffer: &mut Value| {
        for (_, list) in buffer.as_object_mut().unwrap().iter_mut().filter(|(_, list)| list.is_array()) {
            *list = json!([]);
        }
    };
    refused(&empty, "does not fit the run: 0 rows, expected at least one");
    // A completion less in every list.
    let fewer = |buffer: &mut Value| {
        for name in ["ids", "texts", "truncated", "old", "sampled", "reference", "kept", "chosen"] {
            buffer[name][0].as_array_mut().unwrap().pop();
        }
        buffer["reward_totals"].as_array_mut().unwrap().pop();
        buffer["reward_values"][0].as_array_mut().unwrap().pop();
    };
    refused(&fewer, "does not fit the run");
    std::fs::write(&path, state.to_string()).unwrap();
    sign(&one);
    assert_eq!(run(new(2)).unwrap().steps_here, 1);
}

#[test]
fn numbers_that_are_not_finite_are_not_saved() {
    let place = Place::new();
    let setup = place.setup("run");
    Selection::ALL.apply(&setup.model).unwrap();
    let adamw = AdamW::new(optimizer(), setup.model.params());
    let norm = setup.model.params().iter().find(|p| p.name() == "model.norm.weight").unwrap();
    norm.store(&vec![f32::NAN; norm.len()]).unwrap();
    let out = place.out("run");
    let parts = checkpoint::Parts { model: &setup.model, optimizer: Some(&adamw), reference: None };
    let error = checkpoint::save(&out, parts, Default::default(), None, &[]).unwrap_err();
    assert!(error.to_string().starts_with("the value of model.norm.weight is not finite"), "{error}");
    assert!(checkpoint::save_final(&setup.model, &out).is_err());
    assert_eq!(names(&out), BTreeSet::from([".lock".to_owned()]));
}

#[test]
fn what_a_kill_left_unfinished_is_removed() {
    let place = Place::new();
    let out = place.out("run");
    for dir in ["tmp-checkpoint-7", "tmp-old-checkpoint-5", "tmp-final", "tmp-mine", "eval"] {
        std::fs::create_dir_all(out.join(dir)).unwrap();
        std::fs::write(out.join(dir).join("model.safetensors"), "half").unwrap();
    }
    std::fs::remove_file(out.join("eval/model.safetensors")).unwrap();
    for file in [".metrics.jsonl.tmp", "eval/.step-000002.jsonl.tmp"] {
        std::fs::write(out.join(file), "half").unwrap();
    }
    let (result, text) = shown(place.setup("run"));
    result.unwrap();
    let left: Vec<String> = names(&out).into_iter().filter(|n| n.contains("tmp")).collect();
    assert_eq!((left, names(&out.join("eval")).len()), (vec!["tmp-mine".to_owned()], 0));
    assert!(
        text.contains("removed tmp-old-checkpoint-5, which an earlier process left incomplete"),
        "{text}"
    );
}

#[test]
fn a_checkpoint_without_optimizer_state_starts_a_run_and_does_not_resume_one() {
    let place = Place::new();
    let out = place.out("run");
    let new = |steps: u64| {
        let mut setup = place.setup("run");
        (setup.run.max_steps, setup.run.save.when, setup.run.save.only_model) =
            (Some(steps), SaveWhen::Steps(1), true);
        setup
    };
    run(new(1)).unwrap();
    let mut named = new(2);
    named.run.resume.from = ResumeFrom::Path(out.join("checkpoint-1"));
    let message = told(&run(named).unwrap_err());
    assert!(message.contains("SavePlan::only_model"), "{message}");
    // The same command works again.
    let (result, text) = shown(new(2));
    assert_eq!(result.unwrap().steps_here, 2);
    assert!(
        text.contains("no optimizer state (SavePlan::only_model); starting from the beginning"),
        "{text}"
    );
    assert_eq!(checkpoints(&out.join("superseded-1")), ["checkpoint-1"]);
}

#[test]
fn an_interruption_saves_what_going_on_needs() {
    let place = Place::new();
    let new = |name: &str| {
        let mut setup = place.setup(name);
        (setup.run.save.when, setup.run.save.only_model) = (SaveWhen::Steps(2), true);
        setup
    };
    run(new("whole")).unwrap();
    // Asked to stop in the step that a checkpoint without moments is due at.
    let stop = Arc::new(AtomicBool::new(false));
    let (flag, calls) = (Arc::clone(&stop), AtomicU64::new(0));
    let mut setup = new("cut");
    setup.rewards = reward(move |input| {
        if calls.fetch_add(1, Ordering::Relaxed) == 9 {
            flag.store(true, Ordering::Relaxed);
        }
        input.completion_ids.iter().map(|&id| f64::from(id)).sum()
    });
    let mut whole = new("whole-too");
    whole.rewards = reward(|input| input.completion_ids.iter().map(|&id| f64::from(id)).sum());
    run(whole).unwrap();
    let summary = train(setup, &Console::plain(std::io::sink()), &stop).unwrap().summary;
    assert_eq!((summary.steps, summary.interrupted), (2, true));
    let mut again = new("cut");
    again.rewards = reward(|input| input.completion_ids.iter().map(|&id| f64::from(id)).sum());
    let (result, text) = shown(again);
    assert_eq!(result.unwrap().steps_here, 4, "{text}");
    let weights = |name: &str| raw_tensors(&place.out(name).join("model.safetensors"));
    assert!(weights("cut") == weights("whole-too"));
}

#[test]
fn an_evaluation_is_logged_once() {
    let place = Place::new();
    let out = place.out("run");
    let new = || {
        let mut setup = evaluated(&place, "run");
        setup.run.eval.on_start = true;
        setup
    };
    let evaluations = || -> Vec<f64> {
        let rows = lines(&out.join("metrics.jsonl"));
        rows.iter().filter(|row| row.get("eval_reward").is_some()).map(|row| number(row, "step")).collect()
    };
    // Asked to stop during the first evaluation.
    let summary = train(new(), &Console::plain(std::io::sink()), &AtomicBool::new(true)).unwrap().summary;
    assert_eq!((summary.steps, summary.interrupted), (0, true));
    assert_eq!(checkpoints(&out), ["checkpoint-0"]);
    let first = run(new()).unwrap();
    assert_eq!(evaluations(), [0.0, 2.0, 4.0]);
    assert!(first.before.is_some());
    let before = std::fs::read(out.join("metrics.jsonl")).unwrap();
    for _ in 0..2 {
        let (result, text) = shown(new());
        let again = result.unwrap();
        assert_eq!(
            again.after.unwrap().metric("eval_reward"),
            first.after.as_ref().unwrap().metric("eval_reward")
        );
        assert!(text.contains("all steps are done"), "{text}");
        assert!(std::fs::read(out.join("metrics.jsonl")).unwrap() == before);
    }
}

#[test]
fn fewer_steps_than_are_done_are_refused() {
    let place = Place::new();
    let out = place.out("run");
    let new = |steps: u64| {
        let mut setup = place.setup("run");
        (setup.run.max_steps, setup.run.save.when) = (Some(steps), SaveWhen::Steps(2));
        setup
    };
    run(new(4)).unwrap();
    let before = (names(&out), std::fs::read(out.join("README.md")).unwrap());
    let message = told(&run(new(3)).unwrap_err());
    assert!(
        message.contains("max_steps: \"3\"") && message.contains("checkpoint-4 is already at step 4"),
        "{message}"
    );
    assert!((names(&out), std::fs::read(out.join("README.md")).unwrap()) == before);
}

#[test]
fn a_log_that_is_removed_in_mid_run_is_noticed() {
    let place = Place::new();
    let out = place.out("run");
    let mut setup = place.setup("run");
    let (log, calls) = (out.join("metrics.jsonl"), AtomicU64::new(0));
    setup.run.save.when = SaveWhen::Steps(3);
    setup.rewards = reward(move |_| {
        if calls.fetch_add(1, Ordering::Relaxed) == 13 {
            std::fs::remove_file(&log).unwrap();
        }
        0.5
    });
    let (result, text) = shown(setup);
    result.unwrap();
    assert_eq!(text.matches("warning: metrics.jsonl was removed or replaced").count(), 1, "{text}");
    assert_eq!(steps(&out), [3.0, 4.0, 5.0, 6.0]);
    // Lost between two runs, it is noticed by the second.
    std::fs::remove_file(out.join("metrics.jsonl")).unwrap();
    let (_, text) = shown(place.setup("run"));
    assert!(text.contains("metrics.jsonl ends at step 0; the rows up to step 6 are missing"), "{text}");
}

#[test]
fn changed_settings_go_on_where_that_is_allowed() {
    let place = Place::new();
    let out = place.out("run");
    let new = |rate: f64, steps: u64| {
        let mut setup = place.setup("run");
        (setup.run.max_steps, setup.run.save.when) = (Some(steps), SaveWhen::Steps(2));
        setup.optimizer.learning_rate = rate;
        setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
        setup.run.resume.fingerprint.insert("learning_rate".into(), json!(rate));
        setup
    };
    run(new(1e-3, 2)).unwrap();
    let mut changed = new(1e-4, 4);
    changed.run.resume.allow_changed = true;
    let (result, text) = shown(changed);
    assert_eq!(result.unwrap().steps_here, 2);
    assert!(text.contains("resuming with changed settings: learning_rate: 0.001 → 0.0001"), "{text}");
    let rates: Vec<f64> =
        lines(&out.join("metrics.jsonl")).iter().map(|row| number(row, "learning_rate")).collect();
    assert_eq!(rates, [1e-3, 1e-3, 1e-4, 1e-4]);
    // The checkpoints written since have the new settings.
    let (_, text) = shown(new(1e-4, 6));
    assert!(text.contains("at step 4 of 6") && !text.contains("changed"), "{text}");

    // A setting that an earlier version lacked does not differ with the value of that version.
    let newer = |value: &str| {
        let mut setup = new(1e-4, 7);
        setup.run.resume.fingerprint.insert("orientation".into(), json!(value));
        setup.run.resume.before.insert("orientation".into(), json!("stored"));
        setup.run.resume.before.insert("not a setting of this run".into(), json!(1));
        setup.run.resume.from = ResumeFrom::Must;
        setup
    };
    let refused = told(&shown(newer("upright")).0.unwrap_err());
    assert!(refused.contains("(orientation: \"stored\" → \"upright\")"), "{refused}");
    let (_, text) = shown(newer("stored"));
    assert!(text.contains("at step 6 of 7") && !text.contains("changed"), "{text}");

    // A setting that is given no more differs too; what is a digest is not printed.
    let other = || {
        let mut setup = new(1e-4, 6);
        setup.run.resume.fingerprint.remove("learning_rate");
        setup.run.resume.fingerprint.insert("dataset".into(), json!("0123456789abcdef0123456789abcdef"));
        setup
    };
    let refused = told(&shown(other()).0.unwrap_err());
    let parts = ["learning_rate: 0.0001 → unset", "start from the beginning"];
    assert!(parts.iter().all(|part| refused.contains(part)), "{refused}");

    // An earlier version stored settings that bind nothing, one that is gone, and the parts of the batch.
    let older = |gone: i64| {
        let mut setup = new(1e-4, 6);
        let (fingerprint, before) = (&mut setup.run.resume.fingerprint, &mut setup.run.resume.before);
        fingerprint.insert("gone".into(), json!(gone));
        fingerprint.insert("port".into(), json!(gone));
        fingerprint.insert("per_device_train_batch_size".into(), json!(1));
        fingerprint.insert("gradient_accumulation_steps".into(), json!(2));
        before.insert("gone".into(), json!(7));
        setup
    };
    let now = |prompts: u64| {
        let mut setup = new(1e-4, 7);
        setup.run.resume.fingerprint.insert("prompts_per_step".into(), json!(prompts));
        setup.run.resume.before.insert("gone".into(), json!(7));
        setup.run.resume.free = vec!["port", "per_device_train_batch_size", "gradient_accumulation_steps"];
        setup
    };
    for (gone, prompts, why) in [(7, 2, ""), (8, 2, "gone: 8 → unset"), (7, 4, "prompts_per_step: 2 → 4")]
    {
        let place = Place::new();
        let at = |mut setup: TrainSetup| {
            setup.lock = RunLock::acquire(&place.out("older"), "this test").unwrap();
            setup
        };
        run(at(older(gone))).unwrap();
        match run(at(now(prompts))) {
            Ok(summary) => assert!(why.is_empty() && summary.steps_here == 1, "{gone} {prompts}"),
            Err(error) => assert!(!why.is_empty() && told(&error).contains(why), "{}", told(&error)),
        }
    }
    let mut again = other();
    again.run.resume.repeat_complete = true;
    let (result, text) = shown(again);
    result.unwrap();
    assert!(text.contains("starting from the beginning"), "{text}");
    let mut data = new(1e-4, 8);
    data.run.resume.fingerprint.remove("learning_rate");
    data.run.resume.fingerprint.insert("dataset".into(), json!("ffffffffffffffff0123456789abcdef"));
    data.run.resume.allow_changed = true;
    let (result, text) = shown(data);
    result.unwrap();
    assert!(text.contains("changed settings: dataset: content has changed"), "{text}");
    // Other rows are gone through from their beginning: a third of an epoch a step.
    let row = &lines(&out.join("metrics.jsonl"))[6];
    assert_eq!((number(row, "step"), number(row, "epoch")), (7.0, 2.0 / 6.0));
}

/// Recomputation does not use the activations of the rollout, and shorter streams divide sums. A run that resumes with such a change
/// reports it, and so does the next one, which changes it back.
#[test]
fn changes_that_round_are_reported() {
    type Change = (&'static str, fn(&mut TrainSetup), &'static str);
    let changes: [Change; 2] = [
        ("recompute", |s| s.algorithm.recompute = true, "Algorithm::recompute: false → true"),
        ("streams", |s| s.algorithm.max_stream_tokens = Some(40), "Algorithm::max_stream_tokens: 4096 → 40"),
    ];
    let place = Place::new();
    for (name, change, expected) in changes {
        let new = |name: &str, steps: u64| {
            let mut setup = place.setup(name);
            (setup.run.max_steps, setup.run.save.when) = (Some(steps), SaveWhen::Steps(1));
            setup.run.schedule.kind = omnigrpo_train::ScheduleKind::Constant;
            setup
        };
        let with = |steps: u64| {
            let mut setup = new(name, steps);
            change(&mut setup);
            shown(setup).1
        };
        let said = |text: &str| -> Vec<String> {
            text.lines().filter(|line| line.contains("rounding")).map(str::to_owned).collect()
        };
        let whole = format!("{name} whole");
        run(new(&whole, 2)).unwrap();
        assert!(said(&shown(new(name, 1)).1).is_empty());
        let line = |change: &str| {
            format!(
                "resuming with {change}; the results differ by rounding from those of a run without this change"
            )
        };
        assert_eq!(said(&with(2)), [line(expected)]);
        let weights = |name: &str| raw_tensors(&place.out(name).join("model.safetensors"));
        assert!(weights(name) != weights(&whole), "{name}: the results are equal");
        assert!(said(&with(3)).is_empty(), "nothing has changed since");
        let (setting, values) = expected.split_once(": ").unwrap();
        let (old, new_value) = values.split_once(" → ").unwrap();
        let back = shown(new(name, 4)).1;
        assert_eq!(said(&back), [line(&format!("{setting}: {new_value} → {old}"))]);
        // An earlier version did not store the values.
        let four = place.out(name).join("checkpoint-4");
        let path = four.join("trainer_state.json");
        let mut state: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert!(state.as_object_mut().unwrap().remove("rounding").is_some());
        std::fs::write(&path, state.to_string()).unwrap();
        sign(&four);
        assert!(said(&with(5)).is_empty());
    }
}

#[test]
fn checkpoints_can_be_written_by_time() {
    let place = Place::new();
    let mut setup = place.setup("run");
    (setup.run.max_steps, setup.run.save.every) = (Some(2), Some(Duration::ZERO));
    run(setup).unwrap();
    assert_eq!(checkpoints(&place.out("run")), ["checkpoint-1", "checkpoint-2"]);
    let mut setup = place.setup("slow");
    (setup.run.max_steps, setup.run.save.every) = (Some(2), Some(Duration::from_secs(3600)));
    run(setup).unwrap();
    assert!(checkpoints(&place.out("slow")).is_empty());
}

/// The reference is read where the checkpoint lies. Weights that are not what they were stop the run before a step is taken with
/// them; with the file in peace it goes on.
#[test]
fn a_checkpoint_that_is_written_to_stops_the_run() {
    let place = Place::new();
    let weights = place.out("model").join("model.safetensors");
    std::fs::create_dir(place.out("model")).unwrap();
    for name in names(&checkpoint(NAME)) {
        std::fs::copy(checkpoint(NAME).join(&name), place.out("model").join(&name)).unwrap();
    }
    let new = |name: &str, touched: Option<usize>| {
        let mut setup = place.setup(name);
        setup.model = omnigrpo_testkit::load(&place.out("model"), WeightDtype::Auto).unwrap();
        setup.run.save.when = SaveWhen::Steps(1);
        setup.run.max_steps = Some(4);
        let (file, asked) = (weights.clone(), std::sync::atomic::AtomicUsize::new(0));
        setup.rewards = reward(move |input| {
            // Two prompts with three completions a step.
            if touched == Some(asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed) / 6) {
                let open = std::fs::OpenOptions::new().write(true).open(&file).unwrap();
                open.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
            }
            input.completion.len() as f64
        });
        setup
    };
    run(new("whole", None)).unwrap();
    let message = told(&run(new("touched", Some(2))).unwrap_err());
    assert!(
        message.contains("model.safetensors was modified while the reference model read its weights"),
        "{message}"
    );
    assert_eq!(steps(&place.out("touched")), [1.0, 2.0]);
    assert_eq!(checkpoints(&place.out("touched")), ["checkpoint-1", "checkpoint-2"]);
    run(new("touched", None)).unwrap();
    assert_eq!(steps(&place.out("touched")), [1.0, 2.0, 3.0, 4.0]);
    let of = |name: &str| tensors(&place.out(name).join("model.safetensors"));
    assert_eq!(of("touched"), of("whole"));
}
