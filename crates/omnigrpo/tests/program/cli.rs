//! The command line as a user meets it: help, errors, files of settings, presets, precedence.

use std::path::Path;
use std::process::{Command, Output};

fn command(dir: &Path, env: &[(&str, &str)], args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_omnigrpo"));
    command.args(args).env_clear().envs(env.iter().copied()).current_dir(dir);
    command
}

fn run_in(dir: &Path, env: &[(&str, &str)], args: &[&str]) -> Output {
    command(dir, env, args).output().unwrap()
}

fn run(args: &[&str]) -> Output {
    run_in(Path::new("."), &[], args)
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// Returns the error of a command line that must be refused as a usage error.
fn refused(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

/// Writes command lines that must be refused, each with its error.
fn transcript(lines: &[&[&str]]) -> String {
    let one = |args: &&[&str]| format!("$ omnigrpo {}\n{}", args.join(" "), refused(args));
    lines.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// Returns the line of a setting in `--print_config`, without the padding.
fn setting(config: &str, name: &str) -> String {
    let line = config.lines().find(|l| l.trim_start_matches("# ").starts_with(&format!("{name}:"))).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn printed(args: &[&str]) -> String {
    stdout(&run(&[args, &["--print_config"]].concat()))
}

/// Returns the values of `--print_config` without comments.
fn values(config: &str) -> String {
    let settings = config.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    settings.map(|line| format!("{}\n", line.rsplit_once(" # ").unwrap().0.trim_end())).collect()
}

#[test]
fn help_lists_the_commands_and_their_flags_by_section() {
    insta::assert_snapshot!("help", stdout(&run(&["--help"])));
    insta::assert_snapshot!("train_help", stdout(&run(&["train", "--help"])));
    insta::assert_snapshot!("train_first_help", stdout(&run(&["train", "-h"])));
    insta::assert_snapshot!("plan_first_help", stdout(&run(&["plan", "-h"])));
    insta::assert_snapshot!("data_convert_help", stdout(&run(&["data", "convert", "--help"])));
}

/// Returns the flags that a help text lists, without dashes.
fn listed_flags(help: &str) -> Vec<&str> {
    help.lines().filter_map(|line| line.strip_prefix("      --")?.split(' ').next()).collect()
}

/// All commands.
const COMMANDS: [&str; 21] = [
    "init",
    "train",
    "plan",
    "sft",
    "generate",
    "score",
    "eval",
    "data check",
    "data show",
    "data convert",
    "rewards list",
    "rewards run",
    "export",
    "push",
    "doctor",
    "demo",
    "bench",
    "watch",
    "report",
    "completions",
    "man",
];

/// `-h` shows at most fifteen settings, all of which `--help` lists first, with examples whose settings the command takes.
#[test]
fn short_help_shows_a_first_run() {
    for command in COMMANDS {
        let words: Vec<&str> = command.split(' ').collect();
        let short = stdout(&run(&[&words[..], &["-h"]].concat()));
        let long = stdout(&run(&[&words[..], &["--help"]].concat()));
        let (first, all) = (listed_flags(&short), listed_flags(&long));
        let shows_all = first == all;
        assert!(shows_all || first.len() <= 15, "{command}: {}", first.len());
        assert_eq!(all[..first.len()], first, "{command}");
        assert_eq!(short.contains("--help` shows all"), !shows_all, "{command}");
        let examples = short.split_once("Example:\n").unwrap().1.split("\n\n").next().unwrap();
        let examples = examples.replace("\\\n", " ");
        for example in examples.lines().filter(|line| line.trim().starts_with("omnigrpo")) {
            let words: Vec<&str> = example.split_whitespace().skip(1).collect();
            assert!(words.starts_with(&command.split(' ').collect::<Vec<_>>()), "{example}");
            for flag in words.iter().filter_map(|word| word.strip_prefix("--")) {
                assert!(all.contains(&flag), "{example}: {flag}");
            }
        }
    }
    for command in ["train", "plan"] {
        let short = stdout(&run(&[command, "-h"]));
        assert_eq!(listed_flags(&short).len(), 15, "{command}");
        let long = stdout(&run(&[command, "--help"]));
        let last = long.rfind("\n\nSettings of one model family:\n").unwrap();
        assert!(long[last..].contains("--vision_tower") && long[..last].contains("\n\nProgram:\n"), "{long}");
    }
    let config = printed(&["train", "--model", "m", "--reward_funcs", "accuracy", "format", "--use_peft"]);
    assert_eq!(setting(&config, "use_peft"), "use_peft: true # flag");
}

#[test]
fn help_explains_commands_and_settings() {
    for command in ["", "train", "plan", "data", "data check", "rewards"] {
        let words: Vec<&str> = command.split_whitespace().collect();
        let asked = stdout(&run(&[&["help"], &words[..]].concat()));
        assert_eq!(asked, stdout(&run(&[&words[..], &["--help"]].concat())), "{command}");
    }
    let beta = stdout(&run(&["help", "beta"]));
    assert_eq!(beta, stdout(&run(&["help", "--grpo_beta"])));
    insta::assert_snapshot!("help_setting", format!("{beta}\n{}", stdout(&run(&["help", "save_strategy"]))));
    insta::assert_snapshot!(
        "help_unknown",
        transcript(&[&["help", "trian"], &["help", "bta"], &["help", "zzzzz"]])
    );
}

/// `plan` and `init` have the settings of `train` and stop before a model is loaded; a run directory is no part of it.
#[test]
fn plan_is_a_command_of_its_own() {
    let help = stdout(&run(&["plan", "--help"]));
    assert!(
        help.starts_with("Print the memory that `train`") && help.contains("Usage: omnigrpo plan "),
        "{help}"
    );
    let (plan, train) = (help, stdout(&run(&["train", "--help"])));
    let mut both = listed_flags(&train);
    both.retain(|flag| *flag != "dry_run");
    both.sort_unstable();
    let mut own = listed_flags(&plan);
    own.sort_unstable();
    assert_eq!(own, both);
    // `init` also takes the name of the file that it writes.
    let init = stdout(&run(&["init", "--help"]));
    let mut own = listed_flags(&init);
    own.retain(|flag| *flag != "output");
    own.sort_unstable();
    assert_eq!(own, both);
    insta::assert_snapshot!(
        "plan_refuses",
        transcript(&[&["plan"], &["plan", "--bogus", "1"], &["plan", "--dry_run"], &["plan", "rows.json"]])
    );
}

#[test]
fn unknown_names_get_a_suggestion() {
    let lines: &[&[&str]] = &[
        &["train", "--num_generation", "4"],
        &["train", "--learning-rat=1"],
        &["train", "--bf16"],
        &["generate", "--train_file", "x"],
        &["trian"],
        &["data", "sho"],
        &["train", "rows.json"],
        &["train", "--zzz"],
    ];
    insta::assert_snapshot!(transcript(lines));
}

/// A name of 80,000 letters is compared with no known name and quoted by its start.
#[test]
fn long_unknown_names_are_refused_at_once() {
    let (dir, long) = (tempfile::tempdir().unwrap(), "learning_rate".repeat(6154));
    let file = |name: &str, text: String| {
        std::fs::write(dir.path().join(name), text).unwrap();
        dir.path().join(name).to_str().unwrap().to_owned()
    };
    let settings = file("long.yaml", format!("{}: 1\n", &long[..1000]));
    let script = file(
        "long.sh",
        format!("torchrun grpo.py --model_name_or_path m --dataset_name d --{long} 1 --output_dir o\n"),
    );
    let [flag, with_value] = [format!("--{long}"), format!("--{long}=1")];
    let long = long.as_str();
    let lines: [&[&str]; 12] = [
        &["train", &flag, "1"],
        &["train", &with_value],
        &["train", long],
        &["train", "--reward_funcs", long],
        &["train", "--preset", long],
        &["train", "--loss_type", long],
        &["train", "--learning_rate", long],
        &["train", "--question_template", long],
        &["train", "--config", &settings],
        &["help", long],
        &[long],
        &["data", long],
    ];
    let started = std::time::Instant::now();
    for line in lines {
        let told = refused(line);
        assert!(told.len() < 2_000, "{} bytes: {}", told.len(), told.chars().take(1_000).collect::<String>());
        assert!(told.contains("learning_ratelearning_rate"), "{told}");
    }
    run(&["translate", &script]);
    // One name took eight seconds.
    assert!(started.elapsed().as_secs() < 40, "{:?}", started.elapsed());
}

/// Pipes, sockets, devices and directories are no files of settings and no scripts; opening a pipe would wait for a writer.
#[cfg(unix)]
#[test]
fn readers_of_small_files_refuse_pipes_and_devices() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for extension in ["sh", "py", "yaml", "json", "txt"] {
        assert!(Command::new("mkfifo").arg(at(&format!("pipe.{extension}"))).status().unwrap().success());
    }
    std::os::unix::fs::symlink(at("pipe.yaml"), at("link.yaml")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(at("socket.yaml")).unwrap();
    std::fs::write(at("rows.jsonl"), "{\"prompt\": \"1 + 1?\", \"solution\": \"2\"}\n").unwrap();
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/golden/checkpoints/qwen2_vl_untied");
    let train = |name: &str, value: &str| {
        let flags = [
            "--model",
            model,
            "--train_file",
            &at("rows.jsonl"),
            "--max_steps",
            "1",
            "--output_dir",
            &at("o"),
        ];
        let line: Vec<String> =
            ["train"].iter().chain(&flags).chain(&[name, value]).map(ToString::to_string).collect();
        line
    };
    let lines: Vec<Vec<String>> = vec![
        vec!["translate".into(), at("pipe.sh")],
        vec!["translate".into(), at("pipe.py")],
        vec!["translate".into(), at("pipe.yaml")],
        vec!["train".into(), "--config".into(), at("pipe.yaml")],
        vec!["train".into(), "--config".into(), at("link.yaml")],
        vec!["train".into(), "--config".into(), at("socket.yaml")],
        vec!["train".into(), "--config".into(), "/dev/zero".into()],
        vec!["train".into(), "--config".into(), dir.path().to_str().unwrap().into()],
        train("--deepspeed", &at("pipe.json")),
        [
            "train",
            "--model",
            model,
            "--dataset_use",
            "a",
            "--dataset_registry",
            &at("pipe.yaml"),
            "--max_steps",
            "1",
            "--output_dir",
            &at("o"),
        ]
        .map(str::to_owned)
        .to_vec(),
        [
            train("--judge_prompt", &at("pipe.txt")),
            vec!["--reward_funcs".into(), "judge:http://127.0.0.1:1/".into()],
        ]
        .concat(),
        train("--reward_funcs", &format!("{}:f", at("pipe.py"))),
    ];
    for line in lines {
        let mut child = command(dir.path(), &[], &line.iter().map(String::as_str).collect::<Vec<_>>())
            .stderr(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let started = std::time::Instant::now();
        while child.try_wait().unwrap().is_none() {
            let waits = started.elapsed().as_secs() > 60;
            if waits {
                child.kill().unwrap();
                child.wait().unwrap();
            }
            assert!(!waits, "{line:?}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let output = child.wait_with_output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{line:?}");
        assert!(told.contains("not a regular file") || told.contains("no such file"), "{line:?}: {told}");
    }
}

#[test]
fn wrong_values_say_what_was_got_and_expected() {
    let lines: &[&[&str]] = &[
        &["train", "--num_generations", "four"],
        &["train", "--beta", "nan"],
        &["train", "--top_p", "1.5"],
        &["train", "--loss_type", "drgrpo"],
        &["train", "--gradient_checkpointing", "maybe"],
        &["train", "--max_skipped", "150%"],
        &["train", "--chat_template_kwargs", "[1]"],
    ];
    insta::assert_snapshot!(transcript(lines));
    let lines: &[&[&str]] = &[
        &["train", "--exp_name", "a/b"],
        &["train", "--beta"],
        &["train", "--beta", "0.1", "--grpo_beta", "0.2"],
    ];
    insta::assert_snapshot!(transcript(lines));
}

#[test]
fn missing_settings_are_named() {
    let lines: &[&[&str]] = &[
        &["train"],
        &["train", "--model", "m"],
        &["train", "--model", "m", "--output_dir", "o"],
        &["train", "--model", "m", "--output_dir", "o", "--dataset_use", "a"],
        &["score", "--model", "m", "--input", "i"],
        &["generate", "--model", "m"],
        &["eval", "--model", "m"],
        &["data", "convert", "--input", "i", "--output", "o"],
    ];
    insta::assert_snapshot!(transcript(lines));
}

#[test]
fn settings_without_effect_and_contradictions_are_refused() {
    let lines: &[&[&str]] = &[
        &["train", "--loss_type", "sapo", "--epsilon_high", "0.3"],
        &["train", "--eval_steps", "10"],
        &["train", "--beta", "0", "--kl", "k1_seq"],
        &["train", "--num_generations", "1", "--beta", "0"],
        &["train", "--reward_weights", "1", "2", "3"],
        &["eval", "--num_generations", "4"],
        &["train", "--max_steps", "3", "--num_train_epochs", "2"],
        &["train", "--category_column", "kind"],
        &["train", "--replay", "r.jsonl", "--reward_funcs", "random"],
        &["train", "--replay", "r.jsonl", "--importance_sampling_correction", "token_truncate"],
        &["train", "--report_to", "none", "tensorboard"],
        &["sft", "--accuracy_mode", "mcq_iou"],
        &["generate", "--prompt", "Hm?", "--batch_size", "2"],
        &["generate", "--prompt", "Hm?", "--output", "o.jsonl"],
        &["train", "--judge_model", "m", "--reward_workers", "3", "--reward_timeout_secs", "9"],
    ];
    insta::assert_snapshot!(transcript(lines));
    printed(&["train", "--reward_funcs", "mine.py:f", "--reward_workers", "3", "--reward_timeout_secs", "9"]);
    // Clip bounds without effect give a note, since scripts of other trainers always have them.
    let note = |args: &[&str]| {
        let config = printed(&[&["train"], args].concat());
        config.lines().find(|line| line.contains("no ratio is clipped")).map(str::to_owned)
    };
    let told = note(&["--epsilon", "0.1", "--epsilon_high", "0.28"]).unwrap();
    assert!(told.contains("(`epsilon`, `epsilon_high`)") && told.contains("its ratio is 1"), "{told}");
    for more in [
        &["--epsilon", "0.2"][..],
        &["--epsilon", "0.1", "--num_iterations", "2"],
        &["--epsilon", "0.1", "--steps_per_generation", "2"],
        &["--loss_type", "cispo", "--epsilon_high", "0.5"],
    ] {
        assert_eq!(note(more), None, "{more:?}");
    }
    // A value equal to the default changes nothing.
    printed(&["train", "--max_steps", "3", "--num_train_epochs", "1"]);
    printed(&["train", "--fps", "1"]);
    // Rewards of length depend on right answers as well.
    for reward in ["length", "cosine"] {
        let config = printed(&["train", "--reward_funcs", reward, "--accuracy_mode", "emotion"]);
        assert_eq!(setting(&config, "accuracy_mode"), "accuracy_mode: [emotion] # flag");
    }
}

#[test]
fn flags_are_read_in_every_spelling() {
    let same = values(&printed(&[
        "train",
        "--num_generations",
        "4",
        "--gradient_checkpointing",
        "--reward_funcs",
        "accuracy",
        "random",
    ]));
    let other =
        ["train", "--grpo-sample-size=4", "--gradient-checkpointing=yes", "--reward_funcs=accuracy,random"];
    assert_eq!(values(&printed(&other)), same);
    let off = printed(&["train", "--tune_mm_llm", "false", "--max_steps", "-1", "--max_skipped", "1%"]);
    assert_eq!(setting(&off, "tune_mm_llm"), "tune_mm_llm: false # flag");
    assert_eq!(setting(&off, "max_steps"), "max_steps: -1 # flag");
    assert_eq!(setting(&off, "max_skipped"), "max_skipped: 0.01 # flag");
    let lists = printed(&[
        "train",
        "--reward_funcs",
        "accuracy",
        "cmd:python r.py --a 1,2",
        "--reward_weights",
        "1",
        "-0.5",
        "--data_file_paths",
        "a.jsonl:b.jsonl",
        "--image_folders",
        "x:y",
    ]);
    assert_eq!(
        setting(&lists, "reward_funcs"),
        "reward_funcs: [accuracy, \"cmd:python r.py --a 1,2\"] # flag"
    );
    assert_eq!(setting(&lists, "reward_weights"), "reward_weights: [1.0, -0.5] # flag");
    assert_eq!(setting(&lists, "data_file_paths"), "data_file_paths: [a.jsonl, b.jsonl] # flag");
}

#[test]
fn flags_win_over_the_file_the_file_over_the_preset_the_preset_over_defaults() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("run.yaml"), "preset: qwen-video\nbeta: 0.2\ntop-p: 0.8\nlr: 1e-5\n")
        .unwrap();
    let args = ["train", "--config", "run.yaml", "--top_p", "0.7", "--print_config"];
    let config = stdout(&run_in(dir.path(), &[], &args));
    assert_eq!(setting(&config, "top_p"), "top_p: 0.7 # flag");
    assert_eq!(setting(&config, "beta"), "beta: 0.2 # config run.yaml:2");
    assert_eq!(setting(&config, "learning_rate"), "learning_rate: 1.0e-5 # config run.yaml:4");
    assert_eq!(setting(&config, "grpo_alpha"), "grpo_alpha: 0.5 # preset qwen-video");
    assert_eq!(setting(&config, "top_k"), "top_k: 0 # default");
    assert_eq!(setting(&config, "epsilon"), "epsilon: 0.2 # loss_type grpo");
    let other = ["train", "--config", "run.yaml", "--preset", "r1-v", "--print_config"];
    let config = stdout(&run_in(dir.path(), &[], &other));
    assert_eq!(setting(&config, "grpo_alpha"), "grpo_alpha: 1.0 # loss_type grpo");
    // A dataset on the command line replaces that of the preset.
    let config = printed(&["train", "--preset", "qwen-video", "--train_file", "mine.json"]);
    assert_eq!(
        setting(&config, "dataset_use"),
        "# dataset_use: # no effect: the training data are given as files"
    );
}

#[test]
fn a_printed_configuration_reads_back_as_itself() {
    let dir = tempfile::tempdir().unwrap();
    let extra = [
        "--preset",
        "qwen-video",
        "--train_file",
        "a b.json",
        "--stop_strings",
        "no",
        "a\nb \"c\" # d",
        "--chat_template_kwargs",
        "{\"x\": [1, true]}",
        "--system_prompt",
        "null",
        "--replay",
        "0",
        "--learning_rate",
        "1e-7",
        "--resume_from_checkpoint",
        "false",
    ];
    // `replay` samples nothing, so the top_p of the preset is dropped.
    let extra: Vec<&str> =
        extra.iter().copied().filter(|a| !["--stop_strings", "no", "a\nb \"c\" # d"].contains(a)).collect();
    for args in [
        vec!["train", "--stop_strings", "no", "a\nb \"c\" # d"],
        vec!["train", "--format_reward_weight", "0.3"],
        vec!["train", "--preset", "qwen-mcq", "--format_reward_weight", "1"],
        [vec!["train"], extra].concat(),
        vec!["sft"],
        vec!["eval"],
        vec!["demo"],
    ] {
        let first = printed(&args);
        std::fs::write(dir.path().join("c.yaml"), &first).unwrap();
        let again = stdout(&run_in(dir.path(), &[], &[args[0], "--config", "c.yaml", "--print_config"]));
        assert_eq!(values(&first), values(&again));
    }
}

#[test]
fn mistakes_in_files_name_file_and_line() {
    let dir = tempfile::tempdir().unwrap();
    let error = |text: &[u8]| {
        std::fs::write(dir.path().join("c.yaml"), text).unwrap();
        let output = run_in(dir.path(), &[], &["train", "--config", "c.yaml"]);
        assert_eq!(output.status.code(), Some(2));
        String::from_utf8(output.stderr).unwrap()
    };
    let files: &[&[u8]] = &[
        b"beta: 0.1\nnum_generation: 4\n",
        b"# a\n\nbeta: strong\n",
        b"beta: [0.1]\n",
        b"beta: 0.1\ngrpo_beta: 0.2\n",
        b"beta: 0.1\nbeta: 0.2\n",
        b"system_prompt:\n",
        b"config: d.yaml\n",
        b"- beta\n",
        b"beta: {a: [1\n",
        b"loss_type: sapo\nepsilon: 0.3\n",
        b"beta: \xff\n",
    ];
    let all: Vec<String> = files.iter().map(|f| format!("{}\n=> {}", f.escape_ascii(), error(f))).collect();
    insta::assert_snapshot!(all.join("\n"));
    assert!(error(&vec![b'['; 1 << 19]).contains("c.yaml"));
    assert!(error(&vec![b'#'; 1 << 21]).contains("too large"));
    let lines: &[&[&str]] = &[&["train", "--config", "missing.yaml"]];
    insta::assert_snapshot!(transcript(lines));
}

#[test]
fn a_file_for_training_serves_other_commands() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("c.yaml"), "train_file: [a.json]\nbeta: 0.2\nlearning_rate: 1e-5\n")
        .unwrap();
    let config = stdout(&run_in(dir.path(), &[], &["data", "check", "--config", "c.yaml", "--print_config"]));
    assert_eq!(setting(&config, "train_file"), "train_file: [a.json] # config c.yaml:1");
    assert!(!config.contains("beta"));
}

/// The sampling settings of a training run are not used for its evaluation.
#[test]
fn evaluation_takes_its_own_defaults_from_a_file_for_training() {
    let dir = tempfile::tempdir().unwrap();
    let show = |args: &[&str]| stdout(&run_in(dir.path(), &[], &[args, &["--print_config"]].concat()));
    std::fs::write(
        dir.path().join("run.yaml"),
        "train_file: a.json\neval_file: b.json\nnum_generations: 4\ntemperature: 0.7\ntop_p: 0.9\ntop_k: 0\n\
         max_completion_length: 99\nbatch_size: 3\n",
    )
    .unwrap();
    let config = show(&["eval", "--config", "run.yaml"]);
    let note = "# the file of settings describes a training run, whose sampling settings are ignored: `num_generations` 4, \
                `temperature` 0.7, `top_p` 0.9. Set them with flags of `eval`\n";
    assert!(config.contains(note), "{config}");
    for (name, value) in [("num_generations", "1"), ("temperature", "0.0")] {
        assert_eq!(setting(&config, name), format!("{name}: {value} # default"));
    }
    assert_eq!(setting(&config, "max_completion_length"), "max_completion_length: 99 # config run.yaml:7");
    assert_eq!(setting(&config, "batch_size"), "batch_size: 3 # config run.yaml:8");
    // The resolved settings in a run directory give the same result.
    std::fs::write(dir.path().join("resolved.yaml"), show(&["train", "--config", "run.yaml"])).unwrap();
    let config = show(&["eval", "--config", "resolved.yaml"]);
    assert!(config.contains(note), "{config}");
    let config = show(&["generate", "--config", "resolved.yaml"]);
    assert_eq!(setting(&config, "num_generations"), "num_generations: 1 # default");
    assert!(
        config.contains("`temperature` 0.7") && config.contains("Set them with flags of `generate`"),
        "{config}"
    );
    assert!(
        !show(&["score", "--config", "run.yaml"]).contains("are ignored"),
        "none of them is a setting of `score`"
    );
    // Flags apply, and so does a file for evaluations.
    let flags = ["eval", "--config", "run.yaml", "--num_generations", "2", "--temperature", "0.5"];
    let config = show(&flags);
    assert_eq!(setting(&config, "num_generations"), "num_generations: 2 # flag");
    assert_eq!(setting(&config, "temperature"), "temperature: 0.5 # flag");
    std::fs::write(dir.path().join("eval.yaml"), "eval_file: b.json\nnum_generations: 4\ntemperature: 0.7\n")
        .unwrap();
    let config = show(&["eval", "--config", "eval.yaml"]);
    assert_eq!(setting(&config, "num_generations"), "num_generations: 4 # config eval.yaml:2");
    assert!(!config.contains("are ignored"));
}

#[test]
fn the_environment_is_noted() {
    let env = [
        ("WANDB_DISABLED", "true"),
        ("DEBUG_MODE", "true"),
        ("LOG_PATH", "r.log"),
        ("CUDA_VISIBLE_DEVICES", "0"),
    ];
    let config = stdout(&run_in(Path::new("."), &env, &["train", "--report_to", "wandb", "--print_config"]));
    let head: Vec<&str> = config.lines().take_while(|line| !line.is_empty()).collect();
    assert_eq!(
        head,
        [
            "# omnigrpo train",
            "# WANDB_DISABLED is on: nothing is sent to W&B",
            "# DEBUG_MODE is on: scored completions are appended to r.log",
            "# CUDA_VISIBLE_DEVICES=0",
        ]
    );
}

/// Values that the source systems document, by their names in `--print_config`.
#[test]
fn presets_are_pinned_to_their_sources() {
    let video = [
        ("model_name_or_path", "Qwen/Qwen2.5-VL-3B-Instruct"),
        ("num_generations", "4"),
        ("beta", "0.1"),
        ("grpo_alpha", "0.5"),
        ("reward_funcs", "[accuracy, format]"),
        ("reward_weights", "[0.7, 0.3]"),
        ("temperature", "0.7"),
        ("top_p", "0.9"),
        ("max_completion_length", "512"),
        ("grpo_logging_steps", "50"),
        ("learning_rate", "2.0e-5"),
        ("lr_scheduler_type", "cosine"),
        ("warmup_ratio", "0.03"),
        ("weight_decay", "0.1"),
        ("adam_beta1", "0.9"),
        ("adam_beta2", "0.95"),
        ("mm_projector_lr", "2.0e-5"),
        ("tune_mm_llm", "true"),
        ("tune_mm_mlp", "true"),
        ("tune_mm_vision", "false"),
        ("min_pixels", "12544"),
        ("max_pixels", "451584"),
        ("video_max_frames", "8"),
        ("video_min_frames", "4"),
    ];
    let own: [(&str, &[(&str, &str)]); 6] = [
        (
            "r1-v",
            &[
                ("num_generations", "8"),
                ("beta", "0.04"),
                ("temperature", "1.0"),
                ("max_completion_length", "256"),
                ("advantage", "group_std"),
                ("kl", "k3"),
                ("loss_agg", "seq_mean"),
                ("min_pixels", "3136"),
                ("max_pixels", "12845056"),
                ("learning_rate", "1.0e-6"),
            ],
        ),
        (
            "humanomni",
            &[
                ("num_generations", "8"),
                ("beta", "0.04"),
                ("max_completion_length", "512"),
                ("max_pixels", "401408"),
                ("accuracy_mode", "[emotion]"),
                ("num_train_epochs", "2.0"),
            ],
        ),
        (
            "qwen-video",
            &[
                ("dataset_use", "[assy07_grpo]"),
                ("format_mode", "graded"),
                ("accuracy_mode", "[mcq_iou]"),
                ("advantage", "group_center"),
            ],
        ),
        (
            "qwen-mcq",
            &[
                ("format_mode", "strict"),
                ("think", "auto"),
                ("accuracy_mode", "[mcq_exact]"),
                ("advantage", "group_std_clamped"),
            ],
        ),
        (
            "vivqa-x",
            &[
                ("model_name_or_path", "OpenGVLab/InternVL3-1B"),
                ("num_generations", "3"),
                ("beta", "0.1"),
                ("max_completion_length", "1024"),
                ("format_mode", "tags3"),
                ("accuracy_mode", "[short_text]"),
                ("learning_rate", "2.0e-5"),
                ("max_steps", "500"),
                ("epsilon", "0.2"),
                ("reward_weights", "[0.3333333333333333, 0.3333333333333333, 1.0]"),
                ("freeze_vision_modules", "true"),
                ("save_steps", "100"),
                ("data_seed", "42"),
            ],
        ),
        (
            "deepeyes",
            &[
                ("model_name_or_path", "Qwen/Qwen2.5-VL-7B-Instruct"),
                ("environment", "zoom"),
                ("max_turns", "4"),
                ("num_generations", "16"),
                ("max_completion_length", "20480"),
                ("reward_funcs", "[accuracy, format, zoomed]"),
                ("reward_weights", "[0.8, 0.2, 1.2]"),
                ("learning_rate", "1.0e-6"),
                ("beta", "0.0"),
                ("loss_agg", "token_mean"),
            ],
        ),
    ];
    for (preset, pinned) in own {
        let config = printed(&["train", "--preset", preset]);
        let shared: &[_] = if preset.starts_with("qwen") { &video } else { &[] };
        for (name, expected) in pinned.iter().chain(shared) {
            let line = setting(&config, name);
            assert!(
                line.starts_with(&format!("{name}: {expected} # ")),
                "{preset}: {line}, expected {expected}"
            );
        }
    }
}

#[test]
fn presets_show_the_values_of_their_sources() {
    for preset in ["r1-v", "humanomni", "humanomni-v2", "qwen-video", "qwen-mcq", "vivqa-x"] {
        let config = printed(&["train", "--preset", preset]);
        let own: Vec<&str> =
            config.lines().filter(|line| line.ends_with(&format!("# preset {preset}"))).collect();
        let own: Vec<&str> = own.iter().map(|line| line.rsplit_once(" # ").unwrap().0.trim_end()).collect();
        insta::assert_snapshot!(format!("preset_{preset}"), own.join("\n"));
    }
    insta::assert_snapshot!("print_config_defaults", printed(&["train"]));
}

/// Published command lines are accepted, with the notes that they get.
mod sources {
    use super::*;
    use crate::support::published::*;

    fn words<'l>(preset: &'l str, line: &'l str) -> Vec<&'l str> {
        ["train", "--preset", preset].into_iter().chain(line.split_whitespace()).collect()
    }

    /// Returns the notes of a command line that must be accepted, and some of its settings.
    fn accepted(preset: &str, line: &str, settings: &[&str]) -> String {
        let config = printed(&words(preset, line));
        let mut out: String =
            config.lines().take_while(|line| !line.is_empty()).map(|line| format!("{line}\n")).collect();
        for name in settings {
            out.push_str(&format!("{}\n", setting(&config, name)));
        }
        out
    }

    #[test]
    fn r1_omni_runs_as_it_stands() {
        let of = [
            "train_file",
            "torch_dtype",
            "reward_weights",
            "max_prompt_length",
            "report_to",
            "tune_mm_vision",
        ];
        insta::assert_snapshot!("source_r1_omni_humanomni", accepted("humanomni", R1_OMNI, &of));
        insta::assert_snapshot!("source_r1_omni_qwen", accepted("r1-v", R1_OMNI, &of));
    }

    #[test]
    fn qwen_video_runs_as_it_stands() {
        let of = [
            "dataset_use",
            "reward_funcs",
            "reward_weights",
            "format_reward_weight",
            "num_generations",
            "beta",
        ];
        insta::assert_snapshot!("source_qwen_guide", accepted("qwen-video", QWEN_GUIDE, &of));
        insta::assert_snapshot!("source_video_readme", accepted("qwen-mcq", VIDEO_README, &of));
        let of = ["torch_dtype", "eval_strategy", "reward_weights", "report_to"];
        insta::assert_snapshot!("source_no_think", accepted("qwen-mcq", &NO_THINK.line(), &of));
        // Both sample one completion per question: the note explains the effect on each advantage.
        let of =
            ["num_generations", "advantage", "torch_dtype", "eval_strategy", "reward_weights", "report_to"];
        insta::assert_snapshot!("source_actions", accepted("qwen-video", &ACTIONS.line(), &of));
        insta::assert_snapshot!("source_per_token", accepted("qwen-mcq", &PER_TOKEN.line(), &of));
    }

    #[test]
    fn vlm_r1_runs_as_it_stands() {
        let of = [
            "data_file_paths",
            "train_file",
            "max_steps",
            "num_train_epochs",
            "reward_funcs",
            "reward_weights",
        ];
        insta::assert_snapshot!("source_internvl", accepted("vivqa-x", INTERNVL, &of));
        insta::assert_snapshot!("source_internvl_explained", accepted("vivqa-x", INTERNVL_EXPLAINED, &of));
        insta::assert_snapshot!("source_adapters", accepted("vivqa-x", ADAPTERS, &["lora_r", "torch_dtype"]));
        // The README's example of a custom reward gives a name without a program.
        let mine = INTERNVL.replace("accuracy format", "accuracy format explanation my_new_reward");
        let error = refused(&[words("vivqa-x", &mine), vec!["--print_config"]].concat());
        assert!(error.contains("`my_new_reward`") && error.contains("`cmd:PROGRAM`"), "{error}");
        let mine = mine.replace("my_new_reward", "my_new_reward=cmd:./reward.py");
        assert!(accepted("vivqa-x", &mine, &["reward_weights"]).contains("1.0, 1.0]"));
    }

    #[test]
    fn scripts_of_peers_start_with_notes() {
        let shown = |line: &str, of: &[&str]| {
            let words: Vec<&str> = ["train"].into_iter().chain(line.split_whitespace()).collect();
            let config = printed(&words);
            let notes: Vec<&str> = config.lines().take_while(|line| !line.is_empty()).collect();
            [notes.join("\n"), of.iter().map(|name| setting(&config, name)).collect::<Vec<_>>().join("\n")]
                .join("\n")
        };
        let of = ["train_file", "use_peft", "max_completion_length", "num_generations", "batch_unit"];
        insta::assert_snapshot!("source_swift", shown(SWIFT, &of));
        // Without a word about it, the learning rate of verl is constant, and its lower bound counts.
        let verl = "actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.clip_ratio=0.3 \
                    actor_rollout_ref.actor.clip_ratio_low=0.1";
        let schedule = |more: &str| {
            let config = shown(&format!("{verl} {more}"), &["lr_scheduler_type", "epsilon"]);
            config
                .lines()
                .rev()
                .take(2)
                .map(|line| line.split(' ').nth(1).unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(schedule(""), ["0.1", "constant_with_warmup"]);
        assert_eq!(schedule("actor_rollout_ref.actor.optim.warmup_style=cosine"), ["0.1", "cosine"]);
        let warm = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1";
        assert_eq!(
            schedule(&format!("{warm} actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"))[1],
            "cosine"
        );
        let of = [
            "train_file",
            "eval_file",
            "steps_per_generation",
            "gradient_accumulation_steps",
            "beta",
            "report_to",
        ];
        insta::assert_snapshot!("source_verl", shown(VERL, &of));
        insta::assert_snapshot!(
            "source_easy_r1",
            shown(EASY_R1, &["train_file", "dataset_train_split", "reward_funcs"])
        );
    }

    #[test]
    fn two_foreign_settings_that_contradict_each_other_are_an_error() {
        let error = refused(&["train", "--dataset_name", "a.jsonl", "--dataset", "b.jsonl"]);
        for part in
            ["two settings give `train_file`", "`--dataset_name` gives a.jsonl", "`--dataset` gives b.jsonl"]
        {
            assert!(error.contains(part), "{error}");
        }
        let several = refused(&["train", "data.train_files=[a@train,b@train]"]);
        assert!(several.contains("each with its own"), "{several}");
        printed(&["train", "--dataset_name", "a.jsonl", "--dataset", "a.jsonl"]);
    }

    #[test]
    fn all_mistakes_are_told_at_once() {
        let script = format!(
            "{INTERNVL} --use_vllm true --num_generaton 4 --beta nan --frobnicate 1 2 --lr 1 --top_p"
        );
        let script = script.replacen("--use_vllm False", "", 1);
        let lines: &[&[&str]] = &[
            &words("vivqa-x", &script),
            &[
                "train",
                "--num_generations",
                "1",
                "--temperature",
                "0",
                "--kl",
                "k1_seq",
                "--beta",
                "0",
                "rows.json",
            ],
            &["train", "--num_generations", "1", "--temperature", "0", "--kl", "k1_seq", "--beta", "0"],
            &[
                "generate",
                "--optim",
                "lion",
                "--reward_model",
                "M",
                "--num_beams",
                "4",
                "--generation_max_lenght",
                "3",
            ],
        ];
        let transcript = transcript(lines).replace(&lines[0].join(" "), "train …");
        insta::assert_snapshot!(transcript);
    }

    #[test]
    fn files_of_other_trainers_are_read_too() {
        let dir = tempfile::tempdir().unwrap();
        let text = "model_name_or_path: Qwen/Qwen2.5-VL-3B-Instruct\nbf16: true\nreport_to:\n- mlflow\nuse_vllm: false\n\
                    attn_implementation: flash_attention_2\nbeta: 0.1\n";
        std::fs::write(dir.path().join("trl.yaml"), text).unwrap();
        let args = ["train", "--config", "trl.yaml", "--print_config"];
        let config = stdout(&run_in(dir.path(), &[], &args));
        let head: Vec<&str> = config.lines().take_while(|line| !line.is_empty()).collect();
        assert_eq!(
            head,
            [
                "# omnigrpo train",
                "# 3 settings have no counterpart here and have no effect:",
                "#   report_to mlflow: this tracker is unsupported; metrics.jsonl has every number",
                "#   use_vllm false: completions are sampled in the same process with the trained weights",
                "#   attn_implementation flash_attention_2: there is only one attention implementation",
            ]
        );
        assert_eq!(setting(&config, "torch_dtype"), "torch_dtype: bfloat16 # config trl.yaml:2");
        let args = ["train", "--config", "trl.yaml", "--torch_dtype", "float32", "--print_config"];
        let config = stdout(&run_in(dir.path(), &[], &args));
        assert_eq!(setting(&config, "torch_dtype"), "torch_dtype: float32 # flag");
        std::fs::write(dir.path().join("wrong.yaml"), "fp16: true\nbetta: 1\nbeta: x\nfps: 1\nfps-: 2\n")
            .unwrap();
        let output = run_in(dir.path(), &[], &["train", "--config", "wrong.yaml"]);
        insta::assert_snapshot!(String::from_utf8(output.stderr).unwrap());
    }
}

#[test]
fn a_launcher_with_several_processes_is_refused_by_commands_that_do_not_divide_their_work() {
    let args = ["score", "--model", "m", "--output", "o", "--input", "r.jsonl"];
    for [size, rank] in [["WORLD_SIZE", "RANK"], ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"]] {
        let output = run_in(Path::new("."), &[(size, "2"), (rank, "0")], &args);
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        let got = "got: 2 processes";
        assert!(error.contains("a launcher started several processes") && error.contains(got), "{error}");
        // Each process speaks: the variables may be left from another job, and then no other process does.
        let second = run_in(Path::new("."), &[(size, "2"), (rank, "1")], &args);
        assert_eq!((second.status.code(), String::from_utf8(second.stderr).unwrap()), (Some(2), error));
    }
    // A launcher with one process is accepted, and so are several processes of a command that writes nothing.
    let dir = tempfile::tempdir().unwrap();
    let output = run_in(dir.path(), &[("WORLD_SIZE", "1"), ("HF_HUB_OFFLINE", "1")], &args);
    assert!(!String::from_utf8(output.stderr).unwrap().contains("launcher"));
    assert!(run_in(Path::new("."), &[("WORLD_SIZE", "2")], &["rewards", "list"]).status.success());
}

/// Rows of a file are divided over processes, and a prompt is not.
#[test]
fn one_prompt_is_refused_by_several_processes() {
    let args = ["generate", "--model", "m", "--prompt", "Why?"];
    let variables = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "1")];
    let divided = ["--nproc_per_node", "2"];
    for output in [run_in(Path::new("."), &variables, &args), run(&[&args[..], &divided].concat())] {
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains("got: `--prompt` and 2 processes"), "{error}");
    }
}

/// `accelerate launch` starts one process without GPUs, whatever `--num_processes` says.
#[test]
fn a_process_that_accelerate_started_alone_says_so() {
    let told = |variables: &[(&str, &str)], more: &[&str]| {
        let args = ["eval", "--model", "m", "--eval_file", "r.jsonl", "--print_config"];
        stdout(&run_in(Path::new("."), variables, &[&args, more].concat()))
    };
    let alone = [("ACCELERATE_MIXED_PRECISION", "no"), ("MASTER_ADDR", "127.0.0.1")];
    assert!(told(&alone, &[]).contains("--nproc_per_node N"));
    assert!(!told(&alone[1..], &[]).contains("accelerate"));
    assert!(!told(&alone, &["--nproc_per_node", "2"]).contains("accelerate"));
}

#[test]
fn a_launcher_that_cannot_start_a_run_gets_the_line_to_type() {
    let told = |variables: &[(&str, &str)], more: &[&str]| {
        let args = ["train", "--model", "m", "--output_dir", "o", "--train_file", "r.jsonl"];
        let output = run_in(Path::new("."), variables, &[&args, more].concat());
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let srun = told(&[("SLURM_STEP_NUM_TASKS", "4"), ("SLURM_PROCID", "0")], &[]);
    assert!(srun.contains("srun --mpi=pmix") && srun.contains("--mpi=pmi2"), "{srun}");
    let torn = told(&[("WORLD_SIZE", "2")], &[]);
    assert!(torn.contains("RANK: got no value, expected a number below 2"), "{torn}");
    let none = told(&[("PATH", "/nonexistent")], &["--nproc_per_node", "2"]);
    assert!(none.contains("no mpirun") && none.contains("apt install openmpi-bin"), "{none}");
    let unequal =
        told(&[("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")], &["--nproc_per_node", "4"]);
    assert!(unequal.contains("2 processes, `nproc_per_node` 4"), "{unequal}");
    for of_machine in ["LOCAL_WORLD_SIZE", "LOCAL_SIZE"] {
        let machines = [("WORLD_SIZE", "4"), ("RANK", "0"), ("LOCAL_RANK", "0"), (of_machine, "2")];
        let torch = told(&machines, &[]);
        assert!(torch.contains("mpirun -n 4 --host"), "{torch}");
    }
}

#[test]
fn numbers_beyond_a_bound_nobody_reaches_are_told_the_bound() {
    let lines: &[&[&str]] = &[
        &["train", "--save_steps", "99999999999"],
        &["train", "--save_steps", "0"],
        &["train", "--beta", "1e12"],
        &["train", "--reward_weights", "1", "x"],
    ];
    insta::assert_snapshot!(transcript(lines));
}

#[test]
fn a_run_is_shown_in_the_terminal_and_written_as_one_file() {
    let dir = tempfile::tempdir().unwrap();
    let run_dir = dir.path().join("mine, yours");
    std::fs::create_dir(&run_dir).unwrap();
    std::fs::write(run_dir.join("metrics.jsonl"), "{\"step\":1,\"reward\":0.5}\n").unwrap();
    let path = stdout(&run_in(dir.path(), &[], &["report", "mine, yours"]));
    assert!(path.ends_with("report.html\n") && Path::new(path.trim()).is_file(), "{path}");
    let output = run_in(dir.path(), &[], &["report", "nothing"]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(
        error.starts_with("error: no run to show was found\n") && error.contains("nothing does not exist"),
        "{error}"
    );
    let error = String::from_utf8(run_in(dir.path(), &[], &["watch"]).stderr).unwrap();
    assert!(error.contains("`watch` needs `RUN_DIRS`"), "{error}");
    let error =
        String::from_utf8(run_in(dir.path(), &[], &["watch", "x", "--dashbord_port", "1"]).stderr).unwrap();
    assert!(error.contains("dashboard_port"), "{error}");

    // A switch does not take a directory as its value. A pipe gets one line per step, and ends with the run.
    for words in [&["watch", "--tui", "mine, yours"][..], &["watch", "--tui", "true", "mine, yours"]] {
        let lines = stdout(&run_in(dir.path(), &[], words));
        assert_eq!(lines, "step 1/1 | reward 0.500\nthe run stopped after step 1\n", "{words:?}");
    }
}

#[test]
fn completions_and_manual_pages_know_every_flag() {
    let dir = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = stdout(&run(&["completions", shell]));
        for word in ["num_generations", "resume_from_checkpoint", "convert"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        if shell == "bash" {
            assert!(script.contains("vivqa-x"), "values of a choice");
            let path = dir.path().join("omnigrpo.bash");
            std::fs::write(&path, &script).unwrap();
            let output = Command::new("bash").arg("-n").arg(&path).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    assert!(refused(&["completions", "tcsh"]).contains("bash, zsh, fish"));
    let man = dir.path().join("man");
    stdout(&run(&["man", man.to_str().unwrap()]));
    for (words, page) in
        [(vec!["train"], "omnigrpo-train.1"), (vec!["data", "check"], "omnigrpo-data-check.1")]
    {
        // Manual pages escape dashes. `--help` lists every flag of the table.
        let page = std::fs::read_to_string(man.join(page)).unwrap().replace("\\-", "-");
        let help = stdout(&run(&[words, vec!["--help"]].concat()));
        let flags: Vec<&str> =
            help.lines().filter_map(|l| l.trim().strip_prefix("--")?.split(' ').next()).collect();
        assert!(flags.len() > 20);
        for flag in flags {
            assert!(page.contains(&format!("--{flag}")), "{flag}");
        }
    }
}
