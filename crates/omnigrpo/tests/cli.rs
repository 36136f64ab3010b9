//! The command line as a user meets it: help, errors, files of settings, presets, precedence.
#![allow(clippy::unwrap_used, missing_docs)]

use std::path::Path;
use std::process::{Command, Output};

fn run_in(dir: &Path, env: &[(&str, &str)], args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_omnigrpo"))
        .args(args)
        .env_clear()
        .envs(env.iter().copied())
        .current_dir(dir)
        .output()
        .unwrap()
}

fn run(args: &[&str]) -> Output {
    run_in(Path::new("."), &[], args)
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

/// The error of a command line that must be refused as a usage error.
fn refused(args: &[&str]) -> String {
    let output = run(args);
    assert_eq!(output.status.code(), Some(2), "{args:?}: {}", String::from_utf8_lossy(&output.stdout));
    assert!(output.stdout.is_empty());
    String::from_utf8(output.stderr).unwrap()
}

/// Command lines that must be refused, each with its error.
fn transcript(lines: &[&[&str]]) -> String {
    let one = |args: &&[&str]| format!("$ omnigrpo {}\n{}", args.join(" "), refused(args));
    lines.iter().map(one).collect::<Vec<_>>().join("\n")
}

/// The line of a setting in `--print_config`, without the padding.
fn setting(config: &str, name: &str) -> String {
    let line = config.lines().find(|l| l.trim_start_matches("# ").starts_with(&format!("{name}:"))).unwrap();
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn printed(args: &[&str]) -> String {
    stdout(&run(&[args, &["--print_config"]].concat()))
}

/// The values of `--print_config` without comments.
fn values(config: &str) -> String {
    let settings = config.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    settings.map(|line| format!("{}\n", line.rsplit_once(" # ").unwrap().0.trim_end())).collect()
}

#[test]
fn help_lists_the_commands_and_their_flags_by_section() {
    insta::assert_snapshot!("help", stdout(&run(&["--help"])));
    insta::assert_snapshot!("train_help", stdout(&run(&["train", "--help"])));
    insta::assert_snapshot!("data_convert_help", stdout(&run(&["data", "convert", "--help"])));
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
        &[],
    ];
    insta::assert_snapshot!(transcript(lines));
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
        &["train", "--num_generations", "1"],
        &["train", "--reward_weights", "1", "2", "3"],
        &["eval", "--num_generations", "4"],
        &["train", "--max_steps", "3", "--num_train_epochs", "2"],
        &["train", "--category_column", "kind"],
        &["train", "--replay", "r.jsonl", "--reward_funcs", "random"],
        &["sft", "--accuracy_mode", "mcq_iou"],
        &["generate", "--prompt", "Hm?", "--batch_size", "2"],
        &["generate", "--prompt", "Hm?", "--output", "o.jsonl"],
    ];
    insta::assert_snapshot!(transcript(lines));
    // The same value as the default changes nothing, so nothing is lost by it.
    printed(&["train", "--max_steps", "3", "--num_train_epochs", "1"]);
    printed(&["train", "--fps", "1"]);
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
    // `replay` samples nothing, so the preset's top_p is dropped.
    let extra: Vec<&str> =
        extra.iter().copied().filter(|a| !["--stop_strings", "no", "a\nb \"c\" # d"].contains(a)).collect();
    for args in [
        vec!["train", "--stop_strings", "no", "a\nb \"c\" # d"],
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

#[test]
fn the_environment_is_noted() {
    let env = [
        ("WANDB_DISABLED", "true"),
        ("DEBUG_MODE", "true"),
        ("LOG_PATH", "r.log"),
        ("CUDA_VISIBLE_DEVICES", "0"),
    ];
    let config = stdout(&run_in(Path::new("."), &env, &["train", "--print_config"]));
    let head: Vec<&str> = config.lines().take_while(|line| !line.is_empty()).collect();
    assert_eq!(
        head,
        [
            "# omnigrpo train",
            "# WANDB_DISABLED is on: nothing is sent to W&B, as always",
            "# DEBUG_MODE is on: every completion with its rewards is in rollouts/ of the run directory, as always; LOG_PATH is not written",
            "# CUDA_VISIBLE_DEVICES=0",
        ]
    );
}

/// The values that the source systems document, by name as `--print_config` shows them.
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
    let own: [(&str, &[(&str, &str)]); 5] = [
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
    for preset in ["r1-v", "humanomni", "qwen-video", "qwen-mcq", "vivqa-x"] {
        let config = printed(&["train", "--preset", preset]);
        let own: Vec<&str> =
            config.lines().filter(|line| line.ends_with(&format!("# preset {preset}"))).collect();
        let own: Vec<&str> = own.iter().map(|line| line.rsplit_once(" # ").unwrap().0.trim_end()).collect();
        insta::assert_snapshot!(format!("preset_{preset}"), own.join("\n"));
    }
    insta::assert_snapshot!("print_config_defaults", printed(&["train"]));
}
