//! Runs that are killed, interrupted, out of disk or with a broken reward program: files on disk stay usable, and the next run
//! resumes with the same result.

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};

use crate::support::{Place, appears, ran};
use serde_json::json;

const TRAIN: &str = "train --model M --train_file rows.jsonl --reward_funcs random --learning_rate 1e-3 --num_generations 4 --gradient_accumulation_steps 2 --max_completion_length 24 --min_completion_length 24";

/// Steps of a run that a test ends early. A signal may reach it a second late on a busy machine.
const LONG: usize = 150;

fn line(steps: usize, threads: usize, dir: &str) -> String {
    format!("{TRAIN} --max_steps {steps} --save_steps 5 --threads {threads} --output_dir {dir}")
}

/// Returns metrics without times and memory.
fn metrics(place: &Place, dir: &str) -> Vec<String> {
    let rows = place.lines(&format!("{dir}/metrics.jsonl"));
    let measured = |name: &str| {
        ["time/", "memory/", "machine/", "step_time", "data/ahead_time"]
            .iter()
            .any(|start| name.starts_with(start))
    };
    rows.into_iter()
        .map(|mut row| {
            row.as_object_mut().unwrap().retain(|name, _| !measured(name));
            row.to_string()
        })
        .collect()
}

fn same(place: &Place, a: &str, b: &str) {
    assert!(
        place.bytes(&format!("{a}/model.safetensors")) == place.bytes(&format!("{b}/model.safetensors")),
        "weights differ"
    );
    assert_eq!(metrics(place, a), metrics(place, b));
    assert!(!place.names(b).iter().any(|name| name.starts_with("tmp-")), "{:?}", place.names(b));
}

#[test]
fn a_killed_run_goes_on_bit_for_bit() {
    let place = Place::new();
    for threads in [1, 2] {
        let (whole, cut) = (format!("whole{threads}"), format!("cut{threads}"));
        place.run(&line(LONG, threads, &whole)).ok();
        let mut child = place.command(&line(LONG, threads, &cut)).stderr(Stdio::null()).spawn().unwrap();
        assert!(appears(&place.path(&format!("{cut}/checkpoint-10"))));
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None);
        assert!(!place.exists(&format!("{cut}/model.safetensors")), "it was killed before its end");
        let again = place.run(&line(LONG, threads, &cut)).ok();
        assert!(again.stderr.contains("resuming from"), "{}", again.stderr);
        same(&place, &whole, &cut);
    }
    assert!(
        place.bytes("whole1/model.safetensors") == place.bytes("whole2/model.safetensors"),
        "threads matter"
    );
}

#[test]
fn an_interrupted_run_writes_a_checkpoint_and_goes_on() {
    let place = Place::new();
    place.run(&line(LONG, 1, "whole")).ok();
    for signal in ["INT", "TERM", "HUP", "USR1"] {
        let dir = format!("cut{signal}");
        let never = line(LONG, 1, &dir).replace("--save_steps 5", "--save_steps 1000");
        let mut command = place.command(&never);
        let child = command.stderr(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        assert!(appears(&place.path(&format!("{dir}/rollouts/step-000003.jsonl"))));
        let id = child.id().to_string();
        assert!(Command::new("kill").args([&format!("-{signal}"), &id]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(75), "{stderr}");
        assert!(stderr.contains("the run was stopped before its end"), "{stderr}");
        assert!(stderr.contains("start it again to resume from the checkpoint"), "{stderr}");
        assert!(!place.exists(&format!("{dir}/model.safetensors")));
        assert!(place.names(&dir).iter().any(|name| name.starts_with("checkpoint-")));
        assert!(place.run(&never).ok().stderr.contains("resuming from"));
        same(&place, "whole", &dir);
    }
}

/// A supervisor may kill a run and start it again without waiting for its end.
#[test]
fn a_start_right_after_a_kill_is_not_refused() {
    let place = Place::new();
    place.run(&line(LONG, 1, "whole")).ok();
    let mut dead = Vec::new();
    for step in [2, 8, 14] {
        let mut child =
            place.command(&line(LONG, 1, "cut")).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        assert!(
            appears(&place.path(&format!("cut/rollouts/step-{step:06}.jsonl"))),
            "refused before step {step}"
        );
        child.kill().unwrap();
        dead.push(child);
    }
    place.run(&line(LONG, 1, "cut")).ok();
    same(&place, "whole", "cut");
    for mut child in dead {
        child.wait().unwrap();
    }
}

/// An interrupted run can be resumed even with `save_only_model` of a preset.
#[test]
fn an_interrupted_run_that_saves_models_only_goes_on() {
    let place = Place::new();
    let only = |dir: &str| line(LONG, 1, dir) + " --save_only_model";
    place.run(&only("whole")).ok();
    let child = place.command(&only("cut")).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    assert!(appears(&place.path("cut/rollouts/step-000002.jsonl")));
    assert!(Command::new("kill").args(["-TERM", &child.id().to_string()]).status().unwrap().success());
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(75));
    assert!(place.run(&only("cut")).ok().stderr.contains("resuming from"));
    same(&place, "whole", "cut");
    // The last checkpoints of the finished run can only start a run: the same command starts over and overwrites nothing.
    for dir in ["whole", "cut"] {
        let again = place.run(&only(dir)).ok().stderr;
        assert!(again.contains(&format!("{dir}/superseded-1")), "{again}");
    }
    same(&place, "whole", "cut");
}

/// A second process is refused, from a scheduler that believes the run dead or from a launcher.
#[test]
fn a_second_start_in_one_directory_is_refused_and_disturbs_nothing() {
    let place = Place::new();
    // Long enough for three refused starts, each of which waits for the holder for a moment.
    const STEPS: usize = 300;
    place.run(&line(STEPS, 1, "whole")).ok();
    let child =
        place.command(&line(STEPS, 1, "run")).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
    assert!(appears(&place.path("run/rollouts/step-000002.jsonl")));
    let holder = format!("process {} on ", child.id());
    for more in ["", " --seed 2", " --resume_from_checkpoint never"] {
        let refused = place.run(&(line(STEPS, 1, "run") + more));
        refused.fails(1, &["the run directory is in use", &holder, "since 20", "one run per run directory"]);
    }
    assert_eq!(child.wait_with_output().unwrap().status.code(), Some(0));
    same(&place, "whole", "run");
    for step in [1, STEPS] {
        let log = format!("rollouts/step-{step:06}.jsonl");
        assert_eq!(place.lines(&format!("run/{log}")).len(), place.lines(&format!("whole/{log}")).len());
    }
    assert!(!place.text("run/log.txt").contains("in use"), "the log is the first one's");
}

#[cfg(unix)]
#[test]
fn files_have_the_mode_that_the_umask_says() {
    use std::os::unix::fs::PermissionsExt as _;
    let place = Place::new();
    for (umask, expected) in [("077", 0o600), ("027", 0o640), ("022", 0o644)] {
        let program = place.command(&line(5, 1, umask));
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("umask {umask}; exec \"$@\""), "bash"]).arg(program.get_program());
        ran(shell.args(program.get_args()).current_dir(place.path(""))).ok();
        for file in [
            "model.safetensors",
            "config.json",
            "metrics.jsonl",
            "log.txt",
            "rollouts/step-000001.jsonl",
            "tokenizer.json",
            "checkpoint-5/tokenizer.json",
            "checkpoint-5/model.safetensors",
            "checkpoint-5/optimizer.safetensors",
            "checkpoint-5/trainer_state.json",
        ] {
            let mode = std::fs::metadata(place.path(umask).join(file)).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, expected, "umask {umask}, {file}: {mode:o}");
        }
    }
}

/// Files are limited to 600 KiB, enough for the weights and too little for the optimizer.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_last_checkpoint() {
    let place = Place::new();
    place.run(&line(10, 1, "whole")).ok();
    place.run(&line(10, 1, "cut")).ok();
    std::fs::remove_dir_all(place.path("cut/checkpoint-10")).unwrap();
    std::fs::remove_file(place.path("cut/model.safetensors")).unwrap();
    let full = ran(&mut place.limited("-f 600", &line(10, 1, "cut")))
        .fails(1, &["optimizer.safetensors", "File too large"]);
    assert!(full.stderr.contains("resuming from"), "{}", full.stderr);
    let left = place.names("cut");
    assert!(
        left.contains(&"checkpoint-5".to_owned()) && !left.contains(&"checkpoint-10".to_owned()),
        "{left:?}"
    );
    assert!(!left.iter().any(|name| name.starts_with("tmp-") || name == "model.safetensors"), "{left:?}");
    assert!(place.run(&line(10, 1, "cut")).ok().stderr.contains("at step 5 of 10"));
    same(&place, "whole", "cut");
}

/// Completions and evaluations that take hours are not lost with the process that makes them.
#[test]
fn interrupted_generations_and_evaluations_go_on() {
    let place = Place::new();
    let rows: Vec<String> =
        (0..200).map(|i| format!(r#"{{"id": {i}, "problem": "{i}+3?", "solution": "{}"}}"#, i + 3)).collect();
    place.write("many.jsonl", rows.join("\n"));
    let generate = "generate --model M --input many.jsonl --num_generations 2 --temperature 0.7";
    let eval = "eval --model M --eval_file many.jsonl --reward_funcs random,accuracy";
    let small = "--max_completion_length 24 --min_completion_length 24 --batch_size 2 --threads 1";
    for (name, line) in [("generate", generate), ("eval", eval)] {
        let line = |output: &str| format!("{line} {small} --output {output}");
        let (whole, cut) = (format!("{name}-whole.jsonl"), format!("{name}-cut.jsonl"));
        let partial = format!("{cut}.partial");
        place.run(&line(&whole)).ok();
        let kill = || {
            let mut child =
                place.command(&line(&cut)).stderr(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            assert!((0..4000).any(|_| {
                std::thread::sleep(std::time::Duration::from_millis(5));
                std::fs::read(place.path(&partial))
                    .is_ok_and(|text| text.iter().filter(|&&b| b == b'\n').count() > 5)
            }));
            child.kill().unwrap();
            child.wait().unwrap();
            assert!(!place.exists(&cut), "it was killed before its end");
        };
        kill();
        let again = place.run(&line(&cut)).ok();
        assert!(
            again.stderr.contains("resuming after ") && again.stderr.contains(" of 200 rows"),
            "{}",
            again.stderr
        );
        assert!(place.text(&whole) == place.text(&cut), "{name} differs after an interruption");
        assert!(!place.exists(&partial));
        if name == "eval" {
            assert_eq!(place.text("eval-whole.summary.json"), place.text("eval-cut.summary.json"));
        }

        // With other settings the partial rows are neither used nor lost.
        std::fs::remove_file(place.path(&cut)).unwrap();
        kill();
        let other =
            place.run(&line(&cut).replace("--max_completion_length 24", "--max_completion_length 25")).ok();
        let said = format!(
            "was written with other settings (max_completion_length: 24 → 25); its rows are now in {partial}.1; starting again"
        );
        assert!(other.stderr.contains(&said), "{}", other.stderr);
        assert!(place.text(&format!("{partial}.1")).lines().count() > 5);
        assert!(place.text(&whole) != place.text(&cut));
    }
}

/// An interrupted evaluation resumes with the same reward, but not with another one of that name.
#[test]
fn an_evaluation_goes_on_only_with_the_reward_it_began_with() {
    let place = Place::new();
    let rows: Vec<String> =
        (0..4).map(|i| format!(r#"{{"id": {i}, "problem": "{i}?", "solution": "{i}"}}"#)).collect();
    place.write("four.jsonl", rows.join("\n"));
    // It ends at row 2 while a file `stop` exists.
    let script = r#"while read -r line; do id=${line#*\"id\":}; case $line in *\"probe\":true*) ;; *\"row\":2*) [ -e stop ] && exit 1;; esac; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [0.5]}"; done"#;
    place.write("mine.sh", script);
    place.write("stop", "");
    let line = "eval --model M --eval_file four.jsonl --batch_size 1 --max_completion_length 4 --threads 1 --output out.jsonl";
    let run = || place.run_with(line, &["--reward_funcs", "mine=cmd:sh mine.sh"]);
    run().fails(1, &["mine"]);
    let done = place.text("out.jsonl.partial").lines().count();
    assert!(done > 1, "{done} lines");
    std::fs::remove_file(place.path("stop")).unwrap();
    place.write("mine.sh", script.replace("0.5", "0.25"));
    let changed = run().ok();
    assert!(changed.stderr.contains("other settings (content of mine.sh: "), "{}", changed.stderr);
    assert!(
        place.lines("out.jsonl").iter().all(|row| row["reward"] == json!([0.25])),
        "{}",
        place.text("out.jsonl")
    );
    // Finished rows are reused with the reward that scored them.
    std::fs::rename(place.path("out.jsonl.partial.1"), place.path("out.jsonl.partial")).unwrap();
    place.write("mine.sh", script);
    let again = run().ok();
    assert!(again.stderr.contains(&format!("resuming after {} of 4 rows", done - 1)), "{}", again.stderr);
    assert!(
        place.lines("out.jsonl").iter().all(|row| row["reward"] == json!([0.5])),
        "{}",
        place.text("out.jsonl")
    );
}

/// Every second request kills the program before it answers; no step is lost.
#[test]
fn a_reward_program_that_is_killed_mid_run_loses_no_step() {
    let place = Place::new();
    let answer = r#"id=${line#*\"id\":}; case $line in *\"probe\":true*) r=0,0;; *) r=0.1,0.9;; esac; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [$r]}""#;
    place.write("steady.sh", format!("while read -r line; do {answer}; done"));
    let killed = format!(
        "n=0\nwhile read -r line; do n=$((n+1)); [ $n = 2 ] && echo x >> kills && kill -9 $$; {answer}; done"
    );
    place.write("killed.sh", &killed);
    for name in ["steady", "killed"] {
        let line = format!(
            "train --model M --train_file rows.jsonl --max_steps 5 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2 --learning_rate 1e-3 --output_dir {name}"
        );
        place.run_with(&line, &["--reward_funcs", &format!("mine=cmd:\"bash {name}.sh\"")]).ok();
    }
    assert_eq!(place.lines("killed/metrics.jsonl").len(), 5);
    assert!(place.text("kills").lines().count() >= 4, "{}", place.text("kills"));
    same(&place, "steady", "killed");
}

/// Truncating a weight file under a run ends the run with a message; after restoring the file it resumes.
#[cfg(unix)]
#[test]
fn a_model_that_is_cut_off_mid_run_is_told() {
    let place = Place::new();
    place.copied_checkpoint("model");
    std::fs::copy(place.path("model/model.safetensors"), place.path("kept")).unwrap();
    let answer = r#"id=${line#*\"id\":}; case $line in *\"probe\":true*) r=0,0;; *) r=0.1,0.9; [ -e cut ] && : > model/model.safetensors;; esac; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [$r]}""#;
    place.write("cut.sh", format!("while read -r line; do {answer}; done"));
    place.write("cut", "");
    let line = "train --model model --train_file rows.jsonl --max_steps 2 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2 --beta 0.04 --output_dir run";
    let run = || place.run_with(line, &["--reward_funcs", "mine=cmd:\"bash cut.sh\""]);
    run().fails(1, &["a file was truncated", "restore the file"]);
    std::fs::remove_file(place.path("cut")).unwrap();
    std::fs::rename(place.path("kept"), place.path("model/model.safetensors")).unwrap();
    run().ok();
}

/// Overwriting a file of rows ends the run before the new content is used; after restoring the file it resumes.
#[test]
fn rows_that_are_overwritten_mid_run_are_told() {
    let place = Place::new();
    let rows = |word: &str| {
        let row = |i| format!(r#"{{"id": {i}, "problem": "{word} {i}?", "solution": "{i}"}}"#);
        (0..8).map(row).collect::<Vec<_>>().join("\n")
    };
    place.write("mine.jsonl", rows("first"));
    place.write("first.jsonl", rows("first"));
    place.write("other.jsonl", rows("other"));
    let answer = r#"id=${line#*\"id\":}; case $line in *\"probe\":true*) r=0,0;; *) r=0.1,0.9; [ -e swap ] && cat other.jsonl > mine.jsonl;; esac; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [$r]}""#;
    place.write("swap.sh", format!("while read -r line; do {answer}; done"));
    let line = |dir: &str| {
        format!(
            "train --model M --train_file mine.jsonl --allow_text_only --max_steps 4 --save_steps 1 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2 --learning_rate 1e-3 --threads 1 --output_dir {dir}"
        )
    };
    let run = |dir: &str| place.run_with(&line(dir), &["--reward_funcs", "mine=cmd:\"bash swap.sh\""]);
    run("whole").ok();
    place.write("swap", "");
    run("cut")
        .fails(1, &["mine.jsonl:", "the row has changed since the file was opened", "Restore the file"]);
    let logged = place
        .names("cut/rollouts")
        .iter()
        .map(|name| place.text(&format!("cut/rollouts/{name}")))
        .collect::<String>();
    assert!(logged.contains("first ") && !logged.contains("other "), "{logged}");
    std::fs::remove_file(place.path("swap")).unwrap();
    std::fs::copy(place.path("first.jsonl"), place.path("mine.jsonl")).unwrap();
    assert!(run("cut").ok().stderr.contains("resuming from"));
    same(&place, "whole", "cut");
}

/// Without the option for the best metric no message mentions it.
#[test]
fn evaluation_rows_of_which_none_can_be_used_are_told_before_the_first_step() {
    let place = Place::new();
    let row = |i| {
        format!(r#"{{"id": "e{i}", "image": "missing{i}.png", "problem": "<image>What?", "solution": "x"}}"#)
    };
    let line = "train --model M --train_file rows.jsonl --eval_file eval.jsonl --skip_data_check --reward_funcs random --max_steps 2 --eval_strategy steps --eval_steps 1 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2 --output_dir run";
    place.write("eval.jsonl", format!("{}\n{}\n", row(0), row(1)));
    let told = place
        .run(line)
        .fails(1, &["no evaluation row can be used", "2 unusable rows; row 0 (id e0)", "missing0.png"]);
    assert!(!told.stderr.contains("metric"), "{}", told.stderr);
    assert!(!place.exists("run/rollouts/step-000001.jsonl"));
    place.write(
        "eval.jsonl",
        format!("{}\n{}\n", row(0), r#"{"id": "good", "problem": "2?", "solution": "2"}"#),
    );
    place.run(line).ok();
}

/// During a long step a signal is answered immediately, and a second one ends the process immediately.
#[test]
fn the_first_signal_is_answered_and_the_second_ends_the_run_at_once() {
    let place = Place::new();
    let line = "train --model M --train_file rows.jsonl --max_steps 2 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2 --reward_timeout_secs 1000 --output_dir run";
    // The first line belongs to the trial before the run.
    place.write(
        "slow.sh",
        r#"read -r line; id=${line#*\"id\":}; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [0, 0]}"; read -r line; echo asked >> asked; sleep 1000"#,
    );
    let mut command = place.command(line);
    command.args(["--reward_funcs", "cmd:bash slow.sh"]);
    let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
    let mut stderr = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(appears(&place.path("asked")));
    let interrupt = || {
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    };
    interrupt();
    let answer = "finishing step 1, then saving; press Ctrl-C again to stop now";
    assert!(stderr.any(|line| line.unwrap() == answer));
    interrupt();
    assert_eq!(child.wait().unwrap().code(), Some(130));
}

#[test]
fn reward_programs_that_fail_are_named_with_their_rows() {
    let place = Place::new();
    let cases: &[(&str, i32, &[&str])] = &[
        ("cmd:sleep 100", 1, &["reward `sleep`: no answer within 1s for rows 0", "increase the time limit"]),
        ("cmd:false", 1, &["reward `false` failed", "the program ended (exit status: 1)"]),
        ("cmd:no-such-program", 2, &["cannot start `no-such-program`", "is it installed and on PATH?"]),
        ("cmd:cat", 1, &["reward `cat` failed", "the answer has neither `rewards` nor `error`"]),
        ("cmd:bash few.sh", 1, &["reward `few`", "1 value(s) for 2 completions", "nothing was sampled yet"]),
        (
            "cmd:bash one.sh",
            1,
            &[
                "reward `one`",
                "1 value(s) for 2 completions",
                "they were saved to run/rollouts/unscored-step-000001.jsonl",
            ],
        ),
    ];
    let answers = r#"while read -r line; do id=${line#*\"id\":}; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [VALUES]}"; touch tried; done"#;
    place.write("few.sh", answers.replace("VALUES", "1"));
    // It passes the trial before the run.
    place.write("one.sh", answers.replace("VALUES", "$([ -e tried ] && echo 1 || echo 1, 0)"));
    for (reward, code, parts) in cases {
        let _ = std::fs::remove_file(place.path("tried"));
        let line = "train --model M --train_file rows.jsonl --max_steps 1 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2 --reward_timeout_secs 1 --output_dir run";
        let failed = place.run_with(line, &["--reward_funcs", reward]);
        failed.fails(*code, parts);
        assert!(!place.exists("run/model.safetensors"));
        // All but the last are found before anything is sampled.
        assert_eq!(place.exists("run/rollouts"), reward.contains("one.sh"), "{reward}");
    }
    place.write("prompt.txt", "Grade it.");
    for (prompt, part) in [("none.txt", "No such file"), ("prompt.txt", "a text without an answer to grade")]
    {
        let line =
            format!("train --model M --train_file rows.jsonl --output_dir judged --judge_prompt {prompt}");
        place
            .run_with(&line, &["--reward_funcs", "judge:http://127.0.0.1:9/v1"])
            .fails(2, &["the judge's prompt cannot be used", part]);
    }
    // Samples survive when scoring fails.
    assert_eq!(place.names("run/rollouts"), ["unscored-step-000001.jsonl"]);
    let kept = &place.lines("run/rollouts/unscored-step-000001.jsonl")[0];
    assert_eq!(kept["completions"].as_array().unwrap().len(), 2);
    let line = "rewards run --input run/rollouts/unscored-step-000001.jsonl --output scored.jsonl --reward_funcs accuracy,length";
    place.run(line).ok();
    let scored = &place.lines("scored.jsonl")[0];
    assert_eq!((&scored["id"], scored["reward"].as_array().unwrap().len()), (&kept["id"], 2));
}

/// A hanging reward program ends with its killed trainer.
#[cfg(target_os = "linux")]
#[test]
fn reward_programs_end_with_the_run() {
    let place = Place::new();
    place.write("hang.sh", "echo $$ > pid.part; mv pid.part pid; exec sleep 300");
    let line = "train --model M --train_file rows.jsonl --max_steps 1 --num_generations 2 --output_dir run";
    for signal in ["-KILL", "-INT"] {
        let _ = std::fs::remove_file(place.path("pid"));
        let mut command = place.command(line);
        command.args(["--reward_funcs", "cmd:bash hang.sh", "--reward_timeout_secs", "5"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        assert!(appears(&place.path("pid")));
        let program = place.text("pid").trim().to_owned();
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        child.wait().unwrap();
        let alive = || {
            std::fs::read_to_string(format!("/proc/{program}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
        };
        let ended = (0..500).any(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            !alive()
        });
        assert!(ended, "{signal}");
    }
}

/// The password of an address and the token of a command are in no file of a run, and changing them does not change the run.
#[test]
fn secrets_of_rewards_are_not_written() {
    let place = Place::new();
    let answer = r#"id=${line#*\"id\":}; case $line in *\"probe\":true*) r=0,0;; *) r=0.1,0.9;; esac; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [$r]}""#;
    place.write("steady.sh", format!("while read -r line; do {answer}; done"));
    let run = |token: &str, steps: usize| {
        let line = format!(
            "train --model M --train_file rows.jsonl --max_steps {steps} --save_steps 1 --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 2 --output_dir run"
        );
        place
            .run_with(&line, &["--reward_funcs", &format!("mine=cmd:\"bash steady.sh --token {token}\"")])
            .ok()
    };
    run("sesame1", 1);
    assert!(run("sesame2", 2).stderr.contains("resuming from"));
    let found =
        Command::new("grep").args(["-rl", "sesame", "run"]).current_dir(place.path("")).output().unwrap();
    assert_eq!(String::from_utf8(found.stdout).unwrap(), "");
    assert!(place.text("run/config.yaml").contains("--token ***"));
    place
        .run("train --config run/config.yaml")
        .fails(2, &["stands for a secret that is not written to files"]);
}

/// The largest resident memory is the same after 20 and after 200 steps, within 2 %.
#[cfg(target_os = "linux")]
#[test]
#[ignore = "slow: 200 steps"]
fn memory_does_not_grow_over_200_steps() {
    let place = Place::new();
    place.run(&line(200, 2, "long").replace("--save_steps 5", "--save_strategy no")).ok();
    let rows = place.lines("long/metrics.jsonl");
    let peak = |step: usize| rows[step - 1]["memory/peak_mb"].as_f64().unwrap();
    for step in (20..=200).step_by(20) {
        println!("step {step}: {:.1} MB", peak(step));
    }
    assert_eq!(rows.len(), 200);
    assert!(peak(200) <= 1.02 * peak(20), "{} MB after 20 steps, {} MB after 200", peak(20), peak(200));
}

#[test]
fn a_run_that_collapses_says_what_to_change_and_stops_where_it_was_asked_to() {
    let place = Place::new();
    let train = TRAIN.replace("--learning_rate 1e-3", "--learning_rate 0.5");
    let away = format!("{train} --max_steps 14 --save_steps 1 --output_dir run");
    let stopped = place.run(&format!("{away} --stop_on_collapse"));
    stopped.fails(
        1,
        &[
            "warning: the policy ran away (steps ",
            "Lower --learning_rate, or raise --beta",
            "error: the run collapsed and was stopped",
            "--allow_changed_settings",
        ],
    );
    let ran_away = |place: &Place| {
        let mut events = place.lines("run/events.jsonl");
        events.retain(|event| event["kind"] == "problem" && event["rule"] == "ran_away");
        events
    };
    let told = ran_away(&place);
    let last = told.last().unwrap();
    assert_eq!(last["begins"].as_bool(), Some(true));
    assert!(last["text"].as_str().unwrap().contains("Lower --learning_rate"), "{last}");
    assert!(place.text("run/log.txt").contains("the policy ran away"));
    let step = last["step"].as_u64().unwrap();
    assert!(place.exists(&format!("run/checkpoint-{step}/trainer_state.json")));
    // Without the flag the same command resumes there, and says nothing twice.
    place.run(&away).ok();
    // It may say that the policy has come back.
    assert_eq!(ran_away(&place).iter().filter(|event| event["begins"] == true).count(), 1);
    place.run("report run").ok();
    let report = place.text("run/report.html");
    assert!(report.contains("\"marks?run=0\"") && report.contains("the policy ran away"));
}
