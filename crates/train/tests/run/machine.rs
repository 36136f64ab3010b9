//! Failures of the machine: waited for, or the run is saved and stops; either way it ends with the bits of an undisturbed run.

use std::time::Duration;

use omnigrpo_guard::Fault;

use super::*;

/// The reward of all runs here, which first does `at_call` with the number of completions scored before.
fn scored(at_call: impl Fn(u64) + Send + Sync + 'static) -> RewardSet {
    let calls = AtomicU64::new(0);
    reward(move |input| {
        at_call(calls.fetch_add(1, Ordering::Relaxed));
        input.completion_ids.iter().map(|&id| f64::from(id)).sum()
    })
}

/// Six steps on rows with pictures in `media`, which is beside the annotation file.
fn new(
    place: &Place,
    name: &str,
    evaluated: bool,
    at_call: impl Fn(u64) + Send + Sync + 'static,
) -> TrainSetup {
    let media = place.dir.path().join("media");
    if !media.exists() && !place.dir.path().join("away").exists() {
        std::fs::create_dir(&media).unwrap();
        for i in 0..4 {
            std::fs::rename(place.dir.path().join(format!("{i}.png")), media.join(format!("{i}.png")))
                .unwrap();
        }
        let text = std::fs::read_to_string(&place.file).unwrap();
        let text =
            (0..4).fold(text, |text, i| text.replace(&format!("\"{i}.png"), &format!("\"media/{i}.png")));
        std::fs::write(&place.file, text).unwrap();
    }
    let mut setup = place.setup(name);
    setup.rewards = scored(at_call);
    if evaluated {
        setup.eval = Some(greedy_eval(&setup));
        setup.run.eval.when = EvalWhen::Steps(2);
    }
    // The check of a run does the same: folders that were there once are known.
    (0..setup.dataset.len()).for_each(|row| drop(setup.dataset.get(row)));
    setup
}

fn hide(place: &Place) -> impl Fn() + use<> {
    let (here, away) = (place.dir.path().join("media"), place.dir.path().join("away"));
    move || std::fs::rename(&here, &away).unwrap()
}

fn same(place: &Place, a: &str, b: &str) {
    let weights = |name: &str| raw_tensors(&place.out(name).join("model.safetensors"));
    assert!(weights(a) == weights(b), "weights differ");
    assert_eq!(timeless(&place.out(a)), timeless(&place.out(b)));
    assert!(lines(&place.out(b).join("skipped.jsonl")).is_empty());
    let ids = |name: &str| -> Vec<Value> {
        let logs =
            (1..=6).flat_map(|step| lines(&place.out(name).join(format!("rollouts/step-{step:06}.jsonl"))));
        logs.map(|row| row["id"].clone()).collect()
    };
    assert_eq!(ids(a), ids(b));
}

#[test]
fn a_folder_that_is_away_for_a_moment_changes_nothing() {
    let place = Place::new();
    run(new(&place, "whole", false, |_| {})).unwrap();
    let hide = hide(&place);
    let back = (place.dir.path().join("away"), place.dir.path().join("media"));
    let cut = new(&place, "cut", false, move |call| {
        if call == 7 {
            hide();
            let (away, here) = back.clone();
            std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(900));
                std::fs::rename(away, here).unwrap();
            });
        }
    });
    let summary = run(cut).unwrap();
    assert_eq!((summary.steps, summary.interrupted, summary.machine), (6, false, None));
    same(&place, "whole", "cut");
}

#[test]
fn a_folder_that_stays_away_ends_the_run_with_a_checkpoint() {
    let place = Place::new();
    run(new(&place, "whole", false, |_| {})).unwrap();
    let hide = hide(&place);
    let summary = run(new(&place, "cut", false, move |call| {
        if call == 7 {
            hide();
        }
    }))
    .unwrap();
    let machine = summary.machine.unwrap();
    assert!(machine.contains("held media before and is missing or empty now"), "{machine}");
    // In the second step, when the rows of the third may have been read.
    assert!(summary.interrupted && (2..6).contains(&summary.steps), "{}", summary.steps);
    assert!(
        place.out("cut").join(format!("checkpoint-{}", summary.steps)).join("trainer_state.json").exists()
    );
    assert!(lines(&place.out("cut").join("skipped.jsonl")).is_empty(), "no row was skipped");
    std::fs::rename(place.dir.path().join("away"), place.dir.path().join("media")).unwrap();
    assert_eq!(run(new(&place, "cut", false, |_| {})).unwrap().steps_here, 6 - summary.steps);
    same(&place, "whole", "cut");
}

/// The folder goes away in the step before an evaluation, whose rows are read again.
#[test]
fn an_evaluation_that_the_machine_fails_is_made_by_the_next_start() {
    let place = Place::new();
    run(new(&place, "whole", true, |_| {})).unwrap();
    let hide = hide(&place);
    let cut = || new(&place, "cut", true, |_| {});
    let mut first = cut();
    // Twelve completions are scored in two steps; the last of them comes before the evaluation.
    first.rewards = scored(move |call| {
        if call == 11 {
            hide();
        }
    });
    let summary = run(first).unwrap();
    assert_eq!((summary.steps, summary.interrupted), (2, true));
    std::fs::rename(place.dir.path().join("away"), place.dir.path().join("media")).unwrap();
    assert_eq!(run(cut()).unwrap().steps_here, 4);
    same(&place, "whole", "cut");
}

#[test]
fn rows_that_cannot_be_prepared_now_are_no_bad_rows() {
    let place = Place::new();
    let setup = new(&place, "run", false, |_| {});
    hide(&place)();
    let made = omnigrpo_train::prepare(&setup.dataset, &setup.prompts, None, 0, 0);
    let error = made.unwrap_err();
    assert!(matches!(error, TrainError::Machine { row: 0, .. }), "{error}");
    assert_eq!(error.fault(), Fault::Machine);
    // Text needs no folder.
    assert!(omnigrpo_train::prepare(&setup.dataset, &setup.prompts, None, 4, 0).unwrap().is_ok());
}

/// Keeps this thread from starting another one: the kernel answers `EAGAIN`, as it does at a limit. That ends with the thread.
#[cfg(target_os = "linux")]
fn deny_threads() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUALS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const ANSWER: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let line = |code, k| libc::sock_filter { code, jt: 0, jf: u8::from(code == EQUALS), k };
    let refuse = |error: i32| libc::SECCOMP_RET_ERRNO | error as u32;
    // glibc asks for `clone` where `clone3` does not exist.
    let mut filter = [
        line(LOAD, 0),
        line(EQUALS, libc::SYS_clone3 as u32),
        line(ANSWER, refuse(libc::ENOSYS)),
        line(EQUALS, libc::SYS_clone as u32),
        line(ANSWER, refuse(libc::EAGAIN)),
        line(ANSWER, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: both calls only read their arguments.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            + libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program)
    };
    assert_eq!(refused, 0, "{}", std::io::Error::last_os_error());
    let error = std::thread::Builder::new().spawn(|| ()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
}

/// Rows are then prepared and rewards computed on the thread that needs them.
#[cfg(target_os = "linux")]
#[test]
fn a_run_that_gets_no_more_threads_gives_the_same_bits() {
    let place = Place::new();
    run(new(&place, "whole", true, |_| {})).unwrap();
    std::thread::scope(|scope| {
        let limited = || {
            let setup = new(&place, "cut", true, |_| {});
            deny_threads();
            run(setup).unwrap()
        };
        let summary = scope.spawn(limited).join().unwrap();
        assert_eq!((summary.steps, summary.interrupted, summary.machine), (6, false, None));
    });
    same(&place, "whole", "cut");
}
