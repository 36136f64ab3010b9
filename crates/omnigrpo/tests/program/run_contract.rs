//! Files of a run, its first lines, resuming, and settings files of DeepSpeed.

use crate::support::{Place, ran};

const TRAIN: &str = "train --model M --train_file rows.jsonl --reward_funcs random --num_generations 2 --gradient_accumulation_steps 1 --max_completion_length 4 --save_steps 1 --threads 1";

fn example(name: &str) -> String {
    format!("{}/../../examples/deepspeed/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn in_order(text: &str, parts: &[&str]) {
    let mut rest = text;
    for part in parts {
        let Some(at) = rest.find(part) else { panic!("`{part}` is not, or not in this place, in\n{text}") };
        rest = &rest[at + part.len()..];
    }
}

#[test]
fn a_name_gives_the_directories_and_the_log_tells_environment_model_and_steps_in_that_order() {
    let place = Place::new();
    let mut command = place.command(&format!("{TRAIN} --exp_name first --max_steps 2"));
    command.env("DS_SKIP_CUDA_CHECK", "1").env("DEBUG_MODE", "true");
    let stderr = ran(&mut command).ok().stderr;
    let parts = [
        "DS_SKIP_CUDA_CHECK is on: it has no effect",
        "omnigrpo ",
        "model ",
        "a step takes 1 prompt of 2 completions",
        "step 1/2 |",
        "step 2/2 |",
    ];
    in_order(&stderr, &parts);
    let log = place.text("runs/first/log/log.txt");
    in_order(&log, &parts);
    assert!(log.lines().all(|line| line.starts_with("20") && line.contains("Z ")), "{log}");
    // The completions of each reward have a file of their own.
    let debug_logs = |folder: &str| {
        let names = std::fs::read_dir(place.path(folder)).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("grpo_debug")).collect::<Vec<_>>()
    };
    assert!(!debug_logs("runs/first/log").is_empty() && debug_logs(".").is_empty());
    assert!(place.exists("checkpoints/rl/first/checkpoint-2/trainer_state.json"));
    assert!(place.exists("checkpoints/rl/first/metrics.jsonl"));
    assert!(place.exists("checkpoints/rl/first/model.safetensors"));

    place.run(&format!("{TRAIN} --output_dir out --max_steps 1")).ok();
    in_order(&place.text("out/log.txt"), &["omnigrpo ", "model ", "step 1/1 |"]);
}

/// A log in a file has rewards by name, no loss that is always 0, warnings, and no terminal codes, whether of the program, a model
/// or a row.
#[test]
fn a_log_tells_rewards_warnings_and_completions_without_codes() {
    let place = Place::new();
    place.write(
        "rows.jsonl",
        r#"{"id": "a\u001b]0;x\u0007", "problem": "Which\nshape\r?", "solution": "<answer>sq\u001b[2Juare</answer>"}"#,
    );
    // It ends once without an answer, which is a warning.
    place.write(
        "once.sh",
        r#"n=0
while read -r line; do n=$((n+1)); [ $n = 2 ] && [ ! -e been ] && { touch been; printf 'lost \033[31m' >&2; exit 1; }
case $line in *\"probe\":true*) id=${line#*\"id\":}; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [0.5, 0.5]}"; continue;; esac
id=${line#*\"id\":}; echo "{\"id\": ${id%%[,\}]*}, \"rewards\": [0.25, 1]}"; done"#,
    );
    let line = "train --model M --train_file rows.jsonl --num_generations 2 --gradient_accumulation_steps 1 \
                --max_completion_length 4 --allow_text_only --max_steps 4 --logging_steps 3 --grpo_logging_steps 3 --log_completions --threads 1";
    let more = ["--output_dir", "out", "--reward_funcs", "format", "half=cmd:bash once.sh"];
    let stderr = place.run_with(line, &more).ok().stderr;
    for text in [&stderr, &place.text("out/log.txt")] {
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        in_order(
            text,
            &[
                "warning: ",
                "lost \\u{1b}[31m",
                "row a\\u{1b}]0;x\\u{7}: Which\\nshape\\r?",
                "truth <answer>sq\\u{1b}[2Juare</answer>",
                "best  +",
                "(format 0.00, half 1.00)",
                "worst -",
                "(format 0.00, half 0.25)",
                "step 3/4 | reward 0.625: format 0.00, half 0.62 | zero-variance 0 % | clipped 100 %",
                " | eta ",
                "step 4/4 | reward 0.625",
            ],
        );
        assert!(!text.contains("loss 0.0000"), "{text}");
    }

    // The incomplete window at the end of the run is shown as well.
    let line = line.replace("--logging_steps 3", "--logging_steps 1").replace("--log_completions", "");
    let more = ["--output_dir", "windows", "--reward_funcs", "random"];
    let stderr = place.run_with(&line, &more).ok().stderr;
    in_order(
        &stderr,
        &["step 3: grpo/policy_seq_log_prob", "step 3/4 |", "step 4/4 |", "step 4: grpo/policy_seq_log_prob"],
    );
}

#[test]
fn an_error_is_in_the_log_too() {
    let place = Place::new();
    place
        .run(&format!("{} --exp_name lost", TRAIN.replace("--model M", "--model nowhere/no-model")))
        .fails(1, &["the model was not found"]);
    in_order(&place.text("runs/lost/log/log.txt"), &["omnigrpo ", "error: the model was not found"]);
}

#[test]
fn a_missing_file_of_rows_names_the_command_that_makes_it() {
    let place = Place::new();
    let line = TRAIN.replace("rows.jsonl", "ViVQA-X_train_grpo.jsonl");
    place.run(&format!("{line} --exp_name x")).fails(
        1,
        &[
            "the dataset does not exist",
            "omnigrpo data convert vivqa-x --input ViVQA-X_train.json --output ViVQA-X_train_grpo.jsonl",
        ],
    );
    let other = place.run(&format!("{} --exp_name y", TRAIN.replace("rows.jsonl", "nothere.jsonl")));
    let other =
        other.fails(1, &["the dataset does not exist", "at: nothere.jsonl", "help: correct the path"]);
    assert!(!other.stderr.contains("vivqa"), "{}", other.stderr);
}

/// A checkpoint may contain a directory, which is saved, summed and resumed like its other files.
#[test]
fn a_folder_of_templates_goes_with_the_model() {
    let place = Place::new();
    place.checkpoint("base", |_, _| {});
    let name = "additional_chat_templates/tool.jinja";
    std::fs::create_dir(place.path("base/additional_chat_templates")).unwrap();
    place.write(&format!("base/{name}"), "tool");
    let line = |steps: usize| {
        format!("{} --output_dir run --max_steps {steps}", TRAIN.replace("--model M", "--model base"))
    };
    place.run(&line(1)).ok();
    assert!(place.text("run/checkpoint-1/SHA256SUMS").contains(&format!("  {name}\n")));
    // The model of the longer run replaces the first one.
    assert!(place.run(&line(2)).ok().stderr.contains("at step 1 of 2"));
    assert_eq!(place.text(&format!("run/{name}")), "tool");
    place.write(&format!("run/checkpoint-2/{name}"), "fool");
    let damaged = place.run(&line(3)).ok().stderr;
    assert!(damaged.contains("checkpoint-2 is damaged") && damaged.contains("at step 1 of 3"), "{damaged}");
}

#[test]
fn a_run_resumes_only_where_it_makes_sense() {
    let place = Place::new();
    let line = |name: &str, steps: usize| format!("{TRAIN} --exp_name {name} --max_steps {steps}");
    place.run(&line("a", 2)).ok();

    // With the same settings a longer run resumes.
    let longer = place.run(&line("a", 3)).ok().stderr;
    assert!(longer.contains("resuming from checkpoints/rl/a/checkpoint-2 at step 2 of 3"), "{longer}");
    assert_eq!(place.lines("checkpoints/rl/a/metrics.jsonl").len(), 3);

    // With another learning rate it ends with an error that names the setting, and starts from the beginning where that is asked for.
    let faster = format!("{} --learning_rate 0.5", line("a", 1));
    place.run(&faster).fails(1, &["learning_rate: 1e-6 → 0.5"]);
    assert_eq!(place.lines("checkpoints/rl/a/metrics.jsonl").len(), 3);
    let changed = place.run(&(faster + " --resume_from_checkpoint never")).ok().stderr;
    assert!(!changed.contains("resuming") && changed.contains("starting from the beginning"), "{changed}");
    assert_eq!(place.lines("checkpoints/rl/a/metrics.jsonl").len(), 1);

    // A step of as many prompts may be divided in another way; one of more prompts makes another run.
    let divided = |per_device: usize, batches: usize, steps: usize| {
        let batch =
            format!("--per_device_train_batch_size {per_device} --gradient_accumulation_steps {batches}");
        line("c", steps).replace("--gradient_accumulation_steps 1", &batch)
    };
    place.run(&divided(2, 1, 1)).ok();
    let other = place.run(&divided(1, 2, 2)).ok().stderr;
    assert!(other.contains("at step 1 of 2"), "{other}");
    place.run(&divided(2, 2, 3)).fails(1, &["prompts_per_step: 2 → 4"]);
    // The loss `bnpo` is a mean over micro-batches.
    let local = |per_device: usize, batches: usize, steps: usize| {
        divided(per_device, batches, steps).replace("--exp_name c", "--exp_name d --loss_type bnpo")
    };
    place.run(&local(2, 1, 1)).ok();
    place.run(&local(1, 2, 2)).fails(1, &["prompts_per_micro_batch: 2 → 1"]);

    // With a new name, or an emptied directory, it starts from the beginning.
    assert!(!place.run(&line("b", 1)).ok().stderr.contains("resuming"));
    std::fs::remove_dir_all(place.path("checkpoints/rl/b")).unwrap();
    std::fs::create_dir(place.path("checkpoints/rl/b")).unwrap();
    assert!(!place.run(&line("b", 1)).ok().stderr.contains("resuming"));
    assert_eq!(place.lines("checkpoints/rl/b/metrics.jsonl").len(), 1);

    // With `never`, or with the path of a checkpoint.
    let never = place.run(&format!("{} --resume_from_checkpoint never", line("b", 2))).ok().stderr;
    assert!(!never.contains("resuming") && never.contains("resume_from_checkpoint is never"), "{never}");
    let from = "checkpoints/rl/b/checkpoint-1";
    let path = place.run(&format!("{} --resume_from_checkpoint {from}", line("b", 3))).ok().stderr;
    assert!(path.contains(&format!("resuming from {from} at step 1 of 3")), "{path}");
    place.run(&format!("{} --resume_from_checkpoint {from} --learning_rate 0.5", line("b", 3))).fails(
        1,
        &["was written with other settings (learning_rate: 1e-6 → 0.5)", "--allow_changed_settings"],
    );
    let lower = format!("{} --learning_rate 1e-7 --allow_changed_settings", line("b", 4));
    let lower = place.run(&lower).ok().stderr;
    assert!(lower.contains("resuming with changed settings: learning_rate: 1e-6 → 1e-7"), "{lower}");
    assert!(lower.contains("at step 3 of 4"), "{lower}");
}

#[test]
fn flags_of_memory_that_round_are_named_by_a_resume() {
    let place = Place::new();
    let line = |steps: usize| format!("{TRAIN} --exp_name a --max_steps {steps}");
    let said = |line: &str| -> Vec<String> {
        let text = place.run(line).ok().stderr;
        text.lines().filter(|line| line.contains("rounding")).map(str::to_owned).collect()
    };
    assert!(said(&line(1)).is_empty());
    assert!(said(&format!("{} --mm_processor_cache_gb 0", line(2))).is_empty());
    let told = |change: &str| {
        format!(
            "resuming with {change}; the results differ by rounding from those of a run without this change"
        )
    };
    let recomputed = said(&format!("{} --gradient_checkpointing", line(3)));
    assert_eq!(recomputed, [told("--gradient_checkpointing: false → true")]);
    let shorter = said(&format!("{} --gradient_checkpointing --max_stream_tokens 64", line(4)));
    assert_eq!(shorter, [told("--max_stream_tokens: 4096 → 64")]);
}

#[test]
fn what_a_run_depends_on_is_told_by_what_it_holds_and_not_by_where_it_lies() {
    let place = Place::new();
    place.checkpoint("base", |_, _| {});
    place.write("mine.jsonl", crate::support::ROWS);
    let line = |model: &str, rows: &str, steps: usize| {
        TRAIN.replace("--model M", &format!("--model {model}")).replace("rows.jsonl", rows)
            + &format!(" --output_dir run --max_steps {steps}")
    };
    place.run(&line("base", "mine.jsonl", 1)).ok();
    // Other names of the same files, and other limits of time and memory.
    let (model, rows) =
        (place.path("base").display().to_string(), place.path("./mine.jsonl").display().to_string());
    let same = line(&model, &rows, 2) + " --media_timeout_secs 9 --max_stream_tokens 512";
    let same = place.run(&same).ok().stderr;
    assert!(same.contains("at step 1 of 2"), "{same}");
    std::fs::rename(place.path("base"), place.path("moved")).unwrap();
    let moved = place.run(&line("moved", "mine.jsonl", 3)).ok().stderr;
    assert!(moved.contains("at step 2 of 3"), "{moved}");

    // Another answer with the same length.
    place.write("mine.jsonl", crate::support::ROWS.replace("square", "circle"));
    place.run(&line("moved", "mine.jsonl", 4)).fails(1, &["other settings (dataset: content has changed"]);
    assert!(place.exists("run/checkpoint-3") && !place.exists("run/superseded-1"));
    let labels = place.run(&(line("moved", "mine.jsonl", 4) + " --resume_from_checkpoint never")).ok().stderr;
    assert!(labels.contains("run/superseded-1") && !labels.contains("resuming"), "{labels}");
    // Another picture with the same name and length.
    let mut picture = place.bytes("shapes.png");
    *picture.last_mut().unwrap() ^= 1;
    place.write("shapes.png", &picture);
    place
        .run(&(line("moved", "mine.jsonl", 5) + " --resume_from_checkpoint run/checkpoint-4"))
        .fails(1, &["other settings (media: content has changed)"]);
    *picture.last_mut().unwrap() ^= 1;
    place.write("shapes.png", &picture);
    // Weights that were trained again, in the same file.
    let path = "moved/model.safetensors";
    let mut bytes = place.bytes(path);
    let end = bytes.len() - 4;
    bytes[end..].copy_from_slice(&0.125f32.to_le_bytes());
    place.write(path, bytes);
    let weights = line("moved", "mine.jsonl", 5) + " --resume_from_checkpoint run/checkpoint-4";
    place.run(&weights).fails(1, &["other settings (weights of the model: content has changed)"]);
    // Another tokenizer.
    let template = place.text("moved/chat_template.jinja");
    place.write("moved/chat_template.jinja", template + "{# #}");
    place.run(&line("moved", "mine.jsonl", 4)).fails(1, &["files of the model: content has changed"]);
}

#[test]
fn a_run_that_must_resume_does_not_start_anew() {
    let place = Place::new();
    let line = |name: &str, steps: usize| format!("{TRAIN} --exp_name {name} --max_steps {steps}");
    let must = |name: &str, steps: usize| format!("{} --resume_from_checkpoint must", line(name, steps));
    place.run(&line("m", 1)).ok();
    let resumed = place.run(&must("m", 2)).ok().stderr;
    assert!(resumed.contains("resuming from checkpoints/rl/m/checkpoint-1 at step 1 of 2"), "{resumed}");
    place
        .run(&format!("{} --learning_rate 0.5", must("m", 3)))
        .fails(1, &["was written with other settings (learning_rate: 1e-6 → 0.5)"]);
    place.run(&must("c", 1)).fails(
        1,
        &["no checkpoint to resume from was found", "at: checkpoints/rl/c", "none in the run directory"],
    );
    place.run(&format!("{} --resume_from_checkpoint gone", line("m", 3))).fails(
        1,
        &[
            "no checkpoint to resume from was found",
            "at: gone",
            "got: checkpoints/rl/m/checkpoint-1",
            "`checkpoint-N`",
        ],
    );
}

#[test]
fn a_name_with_a_slash_is_refused_with_a_better_one() {
    let place = Place::new();
    place.run(&format!("{TRAIN} --exp_name a/b")).fails(2, &["`exp_name` is not a plain name", "try `a-b`"]);
    assert!(!place.exists("checkpoints"));
}

#[test]
fn deepspeed_files_are_explained_field_by_field() {
    let place = Place::new();
    let line = format!("{TRAIN} --max_steps 1 --output_dir");
    let two = place.run_with(&format!("{line} two --deepspeed"), &[&example("zero2.json")]).ok().stderr;
    for part in [
        "zero_optimization.stage = 2: no effect: there is one process, so nothing is cut into parts",
        "zero_optimization.offload_optimizer.device = \"cpu\": the state is in host memory, as always on a CPU",
        "zero_optimization.overlap_comm = false: a pass waits for each exchange",
        "gradient_clipping = \"auto\": max_grad_norm = 1",
        "train_batch_size = \"auto\": per_device_train_batch_size × gradient_accumulation_steps × processes = 1",
        "fp16.enabled = \"auto\": off: fp16 training is unsupported",
    ] {
        assert!(two.contains(part), "`{part}` is not in\n{two}");
    }
    let three = place.run_with(&format!("{line} three --deepspeed"), &[&example("zero3.json")]).ok().stderr;
    assert!(
        three.contains("zero_optimization.stage = 3: no effect: there is one process, so nothing is cut"),
        "{three}"
    );
    for part in [
        "zero_optimization.overlap_comm = true: no effect: a pass waits for each exchange",
        "zero_optimization.stage3_prefetch_bucket_size = \"auto\": no effect: there is one process, so no weight is cut into parts",
        "zero_optimization.stage3_max_live_parameters = 1000000000.0: no effect: there is one process, so no weight is cut",
    ] {
        assert!(three.contains(part), "`{part}` is not in\n{three}");
    }
    // A planned run has several processes.
    let planned =
        format!("{TRAIN} --dry_run --max_steps 1 --nproc_per_node 2 --gradient_leaves 2 --deepspeed");
    let planned = place.run_with(&planned, &[&example("zero3.json")]).ok();
    let planned = planned.stdout + &planned.stderr;
    for part in [
        "zero_optimization.stage = 3: `shard` is weights: each process has a part",
        "stage3_prefetch_bucket_size = \"auto\": no effect: a layer is fetched when a pass reaches it",
        "stage3_max_live_parameters = 1000000000.0: no effect: a pass completes the weights of one layer at a time, and a rollout",
    ] {
        assert!(planned.contains(part), "`{part}` is not in\n{planned}");
    }
    // Stage 1 and the largest bucket are settings of this program.
    place.write(
        "one.json",
        r#"{"zero_optimization": {"stage": 1, "reduce_bucket_size": 2e5, "allgather_bucket_size": 3e5, "reduce_scatter": true}}"#,
    );
    let one = place.run(&format!("{line} one --deepspeed one.json")).ok().stderr;
    for part in [
        "zero_optimization.stage = 1: no effect: there is one process, so nothing is cut into parts",
        "zero_optimization.reduce_bucket_size = 200000.0: reduce_bucket_size = 300000, the largest bucket",
        "zero_optimization.allgather_bucket_size = 300000.0: reduce_bucket_size, the same",
    ] {
        assert!(one.contains(part), "`{part}` is not in\n{one}");
    }
    assert_eq!(
        place.bytes("two/model.safetensors"),
        place.bytes("three/model.safetensors"),
        "a file that only explains changed the result"
    );
}

/// The stage of a DeepSpeed file and the words of FSDP are values of `shard`.
#[test]
fn files_of_other_trainers_cut_what_their_stage_says() {
    let place = Place::new();
    place.write(
        "three.json",
        r#"{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 5e4, "reduce_bucket_size": "auto"}}"#,
    );
    let shown = |more: &str| {
        let all = place.run(&format!("{TRAIN} --output_dir out --print_config {more}")).ok().stdout;
        let value = |name: &str| {
            let line = all.lines().find(|line| line.starts_with(&format!("{name}:"))).unwrap_or_default();
            line.split_whitespace().nth(1).unwrap_or_default().to_owned()
        };
        [value("shard"), value("shard_min_elements")]
    };
    assert_eq!(shown("--deepspeed three.json"), ["weights", "50000"]);
    assert_eq!(shown("--deepspeed three.json --shard weights --shard_min_elements 7"), ["weights", "7"]);
    assert_eq!(shown("--fsdp full_shard,auto_wrap")[0], "weights");
    assert_eq!(shown("--fsdp shard_grad_op --fsdp_config {\"fsdp_version\":1}")[0], "gradients");
    assert_eq!(shown("--fsdp no_shard")[0], "none");
}

/// The file sets `offload_optimizer` if the model may be on a GPU; the setting itself takes precedence.
#[test]
fn a_deepspeed_file_moves_the_optimizer() {
    let place = Place::new();
    let shown = |more: &str| {
        let line = format!("{TRAIN} --output_dir out --print_config {more} --deepspeed");
        place.run_with(&line, &[&example("zero2.json")]).ok().stdout
    };
    assert!(shown("--device auto").contains("offload_optimizer: cpu"), "{}", shown("--device auto"));
    let own = shown("--device auto --offload_optimizer false");
    let line = own.lines().find(|line| line.starts_with("offload_optimizer:")).unwrap();
    assert!(line.starts_with("offload_optimizer: none ") && line.ends_with("# flag"), "{line}");
    assert!(!shown("--device cpu").contains("offload_optimizer: cpu"));
}

/// The timeout of other trainers is the time after which a process without a sign of life is lost.
#[test]
fn the_timeout_of_other_trainers_is_a_setting_of_ranks() {
    let place = Place::new();
    place.write("trl.yaml", "ddp_timeout: 1800\n");
    let line = format!("{TRAIN} --max_steps 1 --output_dir out --print_config --config trl.yaml");
    let shown = place.run(&line).ok().stdout;
    assert!(shown.contains("\nddp_timeout: 1800 "), "{shown}");
    place.run(&format!("{TRAIN} --output_dir out --ddp_timeout 9")).fails(2, &["ddp_timeout", "10"]);
}

/// The prompts of a step are the completions of the source divided by the size of a group.
#[test]
fn batches_are_counted_as_the_source_counts() {
    let place = Place::new();
    let line = "train --model M --train_file rows.jsonl --reward_funcs random --num_generations 2 --max_completion_length 4 \
                --threads 1 --max_steps 1 --save_strategy no --batch_unit completions";
    let sizes = "--per_device_train_batch_size 4 --gradient_accumulation_steps 3";
    let said = place.run(&format!("{line} {sizes} --output_dir a")).ok().stderr;
    assert!(said.contains("a step takes 6 prompts of 2 completions: 12 answers of at most "), "{said}");
    assert!(said.contains("a batch of 12 counts completions, as the source"), "{said}");
    let metrics = place.lines("a/metrics.jsonl");
    assert_eq!(metrics.len(), 1);
    let completions = place.lines("a/rollouts/step-000001.jsonl").len();
    assert_eq!(completions, 12);
    place
        .run(&format!(
            "{line} --per_device_train_batch_size 3 --gradient_accumulation_steps 1 --output_dir b"
        ))
        .fails(
            2,
            &[
                "the batch is not a multiple of `num_generations`",
                "`num_generations` 2",
                "--batch_unit prompts",
            ],
        );
    assert!(!place.exists("b"));
}

/// All processes of a launcher, or those that the program is to start, share a step.
#[test]
fn a_batch_that_the_processes_cannot_divide_is_refused_with_their_number() {
    let place = Place::new();
    let line = |each: usize| {
        format!(
            "train --model M --train_file rows.jsonl --reward_funcs random --num_generations {each} --batch_unit completions \
             --per_device_train_batch_size 2 --gradient_accumulation_steps 3 --output_dir a"
        )
    };
    let launched = [("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_RANK", "0")];
    let parts = ["`gradient_accumulation_steps` 3 × 2 processes: 12 completions, `num_generations` 5"];
    ran(place.command(&line(5)).envs(launched)).fails(2, &parts);
    place.run(&format!("{} --nproc_per_node 2", line(5))).fails(2, &parts);
    place.run(&line(4)).fails(2, &["`gradient_accumulation_steps` 3: 6 completions, `num_generations` 4"]);
    // Twelve completions are three groups of four. Without a launcher, the processes cannot start.
    let mut divided = place.command(&format!("{} --nproc_per_node 2", line(4)));
    ran(divided.env("PATH", "/nonexistent")).fails(1, &["no mpirun"]);
    assert!(!place.exists("a"));
}

/// TRL counts batches per rollout; three of them are one step here. The stored configuration keeps its unit, so a resumed run
/// does not divide twice.
#[test]
fn batches_of_a_rollout_are_counted_as_the_source_counts() {
    let place = Place::new();
    let line = "train --model M --train_file rows.jsonl --reward_funcs random --num_generations 2 --max_completion_length 4 \
                --threads 1 --save_steps 1 --batch_unit completions --per_device_train_batch_size 2 \
                --gradient_accumulation_steps 3";
    let prompts = |dir: &str, step: usize| {
        let path = format!("{dir}/rollouts/step-{step:06}.jsonl");
        if place.exists(&path) { place.lines(&path).len() / 2 } else { 0 }
    };
    for (batches, of_rollout) in [(1, 3), (3, 3), (6, 6)] {
        let dir = format!("of-{batches}");
        place.run(&format!("{line} --max_steps 2 --steps_per_generation {batches} --output_dir {dir}")).ok();
        assert_eq!(prompts(&dir, 1) + prompts(&dir, 2), 6, "{batches} batches");
        assert_eq!(place.lines(&format!("{dir}/metrics.jsonl")).len(), 2);
        place.run(&format!("train --config {dir}/config.yaml --max_steps 4")).ok();
        assert_eq!(
            (1..=4).map(|step| prompts(&dir, step)).sum::<usize>(),
            12,
            "{of_rollout} prompts of a rollout"
        );
    }
    place.run(&format!("{line} --max_steps 2 --steps_per_generation 4 --output_dir wrong")).fails(
        2,
        &[
            "do not form complete steps",
            "`steps_per_generation` 4",
            "a multiple of `gradient_accumulation_steps`",
        ],
    );
}

/// Settings file in the fine-tuning code of Qwen2.5-VL and VLM-R1.
#[test]
fn deepspeed_settings_with_offload_are_explained() {
    let place = Place::new();
    place.write(
        "offload.json",
        r#"{"fp16": {"enabled": "auto", "loss_scale": 0}, "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
                "offload_param": {"device": "cpu", "pin_memory": true}, "sub_group_size": 1e9,
                "stage3_max_live_parameters": 1e9, "gather_16bit_weights_on_model_save": true},
            "steps_per_print": 1e5, "wall_clock_breakdown": false}"#,
    );
    let shown =
        place.run(&format!("{TRAIN} --max_steps 1 --output_dir out --deepspeed offload.json")).ok().stderr;
    let part = "zero_optimization.gather_16bit_weights_on_model_save = true: checkpoints are always complete";
    assert!(shown.contains(part), "{shown}");
}

#[test]
fn a_deepspeed_file_may_place_the_state_on_a_disk() {
    let place = Place::new();
    place.write(
        "nvme.json",
        r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "disk",
            "pipeline_read": true}}, "aio": {"block_size": 1048576}}"#,
    );
    let line = format!("{TRAIN} --max_steps 1 --output_dir out --deepspeed nvme.json");
    place.run(&line).fails(1, &["for the optimizer's state", "disk", "No such file or directory"]);
    std::fs::create_dir(place.path("disk")).unwrap();
    let shown = place.run(&line).ok().stderr;
    assert!(shown.contains("`offload_optimizer`: the state is in files"), "{shown}");
    let row = &place.lines("out/metrics.jsonl")[0];
    assert_eq!(row["memory/optimizer_mb"], 0.0, "{row}");
    // The setting differs from the file, and the message says so.
    let other = format!("{TRAIN} --output_dir other --deepspeed nvme.json --offload_optimizer none");
    place.run(&other).fails(2, &["offload_optimizer.device", "`offload_optimizer` is none"]);
    place.write("cpu.json", r#"{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}"#);
    let other = format!("{TRAIN} --output_dir other --deepspeed cpu.json --offload_optimizer file");
    place.run(&other).fails(2, &["offload_optimizer.device", "`offload_optimizer` is file"]);
}

#[test]
fn deepspeed_fields_that_would_be_disregarded_are_errors() {
    let place = Place::new();
    let refused = |content: &str, parts: &[&str]| {
        place.write("ds.json", content);
        place.run(&format!("{TRAIN} --output_dir out --deepspeed ds.json")).fails(2, parts);
    };
    refused(
        r#"{"zero_optimization": {"overlap_comm": "yes", "stage3_max_live_parameters": -1, "stage3_prefetch_bucket_size": "large"}}"#,
        &[
            "zero_optimization.overlap_comm = \"yes\": expected true or false",
            "zero_optimization.stage3_max_live_parameters = -1: expected \"auto\" or a number of elements",
            "zero_optimization.stage3_prefetch_bucket_size = \"large\": expected \"auto\" or a number of elements",
        ],
    );
    refused(
        r#"{"fp16": {"enabled": true}}"#,
        &["fp16.enabled = true: fp16 training is unsupported; use bf16"],
    );
    refused(
        r#"{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}"#,
        &["zero_optimization.offload_param.device = \"nvme\": offload to a disk is unsupported"],
    );
    refused(
        r#"{"gradient_clipping": 0.5, "optimizer": {"type": "OneBitAdam", "params": {"betas": [0.9, 0.95]}}}"#,
        &[
            "gradient_clipping = 0.5: max_grad_norm is 1; write \"auto\" or the same number",
            "optimizer.type = \"OneBitAdam\": the only optimizer is AdamW",
            "optimizer.params.betas = [0.9,0.95]: adam_beta1 and adam_beta2 is 0.9, 0.999",
        ],
    );
    refused(
        r#"{"zero_optimization": {"stage": 1, "reduce_scatter": false}, "gradient_predivide_factor": 2}"#,
        &[
            "reduce_scatter = false: each process receives the sum of its part; expected true",
            "gradient_predivide_factor = 2: gradients are normalised before they are summed; expected 1",
        ],
    );
    place.write("one.json", r#"{"zero_optimization": {"stage": 1}}"#);
    place.run(&format!("{TRAIN} --output_dir out --shard none --deepspeed one.json")).fails(
        2,
        &["zero_optimization.stage = 1: `shard` is none; remove that setting or write the same stage"],
    );
    place
        .run(&format!("{TRAIN} --output_dir out --fsdp hybrid_shard"))
        .fails(2, &["weights are cut over all processes; write full_shard or shard_grad_op"]);
    for (fields, what) in [
        (r#"{"fsdp_state_dict_type":"SHARDED_STATE_DICT"}"#, "checkpoints are complete"),
        (r#"{"sharing":1}"#, "a field of it is unknown or unsupported"),
        ("gone.json", "expected a JSON file, or JSON text"),
    ] {
        place
            .run_with(&format!("{TRAIN} --output_dir out --fsdp full_shard --fsdp_config"), &[fields])
            .fails(2, &[what]);
    }
    let offload = r#"{"fsdp_offload_params":true,"min_num_params":1}"#;
    for (fsdp, what) in [
        ("shard_grad_op", "only cut weights are in main memory"),
        ("full_shard", "give `--shard_min_elements`"),
    ] {
        place
            .run_with(&format!("{TRAIN} --output_dir out --fsdp {fsdp} --fsdp_config"), &[offload])
            .fails(2, &[what]);
    }
    let offload = r#"{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}, "nothing": 1}"#;
    place.write("ds.json", offload);
    place
        .run(&format!("{TRAIN} --output_dir out --device emulated --deepspeed ds.json"))
        .fails(2, &["only cut weights are in host memory; write stage 3"]);
    refused(
        r#"{"activation_checkpointing": {"partition_activations": true}}"#,
        &["not a field this program knows"],
    );
    refused("[1, 2]", &["no JSON object"]);
    refused(r#"{"zero_optimization": {"stage": "#, &["the DeepSpeed file cannot be read", "EOF"]);
    place
        .run(&format!("{TRAIN} --output_dir out --deepspeed gone.json"))
        .fails(2, &["the DeepSpeed file cannot be read", "No such file"]);
}

#[test]
fn every_preset_has_a_launch_script_that_sets_what_it_says() {
    let place = Place::new();
    let examples = format!("{}/../../examples/presets", env!("CARGO_MANIFEST_DIR"));
    let presets = format!("{}/../settings/presets", env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    for entry in std::fs::read_dir(presets).unwrap() {
        let name = entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned();
        let script = format!("{examples}/{name}.sh");
        let mut bash = std::process::Command::new("bash");
        bash.args([&script, "--max_steps", "7", "--print_config"]).current_dir(place.path(""));
        let config = ran(bash.env("OMNIGRPO", env!("CARGO_BIN_EXE_omnigrpo"))).ok().stdout;
        assert!(
            config.contains(&format!("# preset {name}")) && config.contains("\nmax_steps: 7 "),
            "{config}"
        );
        count += 1;
    }
    assert_eq!(count, 9);
}

#[test]
fn a_run_tells_how_it_ended_and_writes_no_secret() {
    let place = Place::new();
    let line = format!("{TRAIN} --max_steps 1 --output_dir out");
    let more =
        ["--notify", "cmd:tee -a message.jsonl", "cmd:false --token abc", "http://127.0.0.1:1/services/KEY"];
    let stderr = place.run_with(&line, &more).ok().stderr;
    let messages = place.lines("message.jsonl");
    assert_eq!(messages.len(), 1);
    let message = &messages[0];
    assert_eq!(
        (&message["event"], &message["step"], &message["run"]),
        (&"done".into(), &1.into(), &"out".into())
    );
    assert_eq!(message["message"], "all 1 steps are done");
    assert_eq!(message["directory"], place.path("out").canonicalize().unwrap().display().to_string());
    for failed in ["the message `done` did not reach `false`", "did not reach `127.0.0.1:1`"] {
        assert!(stderr.contains(failed), "{stderr}");
    }
    let config = place.text("out/config.yaml");
    assert!(config.contains("http://127.0.0.1:1/***"), "{config}");
    for text in [stderr, place.text("out/log.txt"), config, place.text("out/README.md")] {
        assert!(!text.contains("KEY") && !text.contains("abc"), "{text}");
    }

    // The rows are checked before the first step.
    place.write("rows.jsonl", "");
    let refused = place.run_with(&format!("{TRAIN} --max_steps 1 --output_dir other"), &more[..2]);
    refused.fails(1, &["the dataset is empty"]);
    let message = place.lines("message.jsonl").remove(1);
    assert_eq!((&message["event"], &message["step"]), (&"failed".into(), &serde_json::Value::Null));
    assert!(message["message"].as_str().unwrap().starts_with("it failed: "), "{message}");
    // A target that is neither is refused before anything is written.
    place
        .run_with(&format!("{TRAIN} --max_steps 1 --output_dir third"), &["--notify", "me@example.org"])
        .fails(2, &["wrong destination of messages", "`cmd:PROGRAM ARGUMENTS`"]);
    assert!(!place.exists("third/metrics.jsonl"));
}
