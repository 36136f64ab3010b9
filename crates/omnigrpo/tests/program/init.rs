//! `init`: the written settings train as they stand, for each family and for rows of each kind of answer.

use crate::support::{Place, golden};
use serde_json::{Value, json};

/// Kinds of answers: a question, its ground truths, and lines of the settings that follow from them.
fn kinds() -> Vec<(&'static str, &'static str, Vec<&'static str>, [&'static str; 3])> {
    const DEFAULT: &str = "question_template: default";
    const BOTH: &str = "reward_funcs: [accuracy, format]";
    vec![
        (
            "letters",
            "Which?\n(A) red\n(B) blue",
            vec!["A", "(B) blue"],
            ["accuracy_mode: [mcq_exact]", DEFAULT, BOTH],
        ),
        (
            "actions",
            "Which actions?\n(A) run\n(B) jump\n(C) sit",
            vec!["A, C", "B, C"],
            ["accuracy_mode: [mcq_iou]", DEFAULT, BOTH],
        ),
        ("numbers", "How many?", vec!["3", "12"], ["accuracy_mode: [math]", DEFAULT, BOTH]),
        (
            "boxed",
            "What is half of one? Put the answer into \\boxed{}.",
            vec!["\\boxed{\\frac{1}{2}}"],
            ["accuracy_mode: [math]", "question_template: none", "reward_funcs: [accuracy]"],
        ),
        ("yes_no", "Is it red?", vec!["yes", "No"], ["accuracy_mode: [yes_no]", DEFAULT, BOTH]),
        ("words", "Which emotion?", vec!["angry", "happy"], ["accuracy_mode: [label]", DEFAULT, BOTH]),
        (
            "text",
            "What happens?",
            vec!["a man walks his dog in the park"],
            ["accuracy_mode: [fuzzy]", DEFAULT, BOTH],
        ),
        (
            "boxes",
            "Where is it?",
            vec!["[1, 2, 30, 40]"],
            ["accuracy_mode: [iou]", "question_template: rec", BOTH],
        ),
        ("mixed", "What?", vec!["3", "yes", "angry"], ["accuracy_mode: [auto]", DEFAULT, BOTH]),
        (
            "tags",
            "Which? Answer in <think> and <answer> tags.",
            vec!["<answer>angry</answer>"],
            ["accuracy_mode: [label]", "question_template: none", BOTH],
        ),
    ]
}

fn rows(question: &str, solutions: &[&str], image: bool) -> String {
    let row = |solution: &&str| {
        let mut row = json!({"problem": question, "solution": solution});
        if image {
            row["image"] = "shapes.png".into();
        }
        row.to_string() + "\n"
    };
    solutions.iter().map(row).collect()
}

/// Checks that the written file is accepted by `train --dry_run` and trains two steps; the tests sample short completions.
fn trains(place: &Place, name: &str) {
    let small = "--max_steps 2 --num_generations 2 --max_completion_length 4 --threads 1";
    let ran = place.run(&format!("train --config omnigrpo.yaml {small}")).ok();
    assert!(ran.stderr.contains("step 2/2 |"), "{name}: {}", ran.stderr);
    assert!(place.exists("runs/first/model.safetensors"), "{name}");
}

#[test]
fn rows_of_each_kind_get_a_reward_that_fits() {
    for (at, (name, question, solutions, lines)) in kinds().into_iter().enumerate() {
        let place = Place::new();
        place.write("mine.jsonl", rows(question, &solutions, true));
        place.run("init --model_name_or_path M --train_file mine.jsonl").ok();
        let text = place.text("omnigrpo.yaml");
        for line in lines {
            assert!(text.contains(line), "{name}: {line} in\n{text}");
        }
        // It measures the machine's rates, which takes longer than the steps.
        if at == 0 {
            place.run("train --config omnigrpo.yaml --dry_run").ok();
        }
        trains(&place, name);
    }
}

#[test]
fn every_family_trains_with_what_is_written() {
    for family in [
        "qwen2_vl_tied",
        "qwen2_5_vl_untied",
        "qwen3_vl",
        "qwen3_vl_moe",
        "internvl_hf",
        "internvl3_5_original",
        "aria",
        "smolvlm",
        "humanomni",
        "omni",
        "qwen2_audio",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "llama",
    ] {
        let place = Place::new();
        let heard =
            json!({"audio": "rise.wav", "problem": "<audio>Which emotion?", "solution": "angry"}).to_string();
        let clip = json!({"video": "clip.gif", "problem": "Which emotion?", "solution": "angry"}).to_string();
        match family {
            "humanomni" => place.write("mine.jsonl", clip),
            "qwen2" | "qwen3" | "qwen3_moe" | "llama" => {
                place.write("mine.jsonl", rows("How many?", &["3", "12"], false))
            }
            "qwen2_audio" => place.write("mine.jsonl", heard.clone()),
            _ => place.write("mine.jsonl", rows("How many?", &["3", "12"], true)),
        }
        let model = golden("checkpoints").join(family).display().to_string();
        place.run_with("init --train_file mine.jsonl --model_name_or_path", &[&model]).ok();
        trains(&place, family);
        // Rows with sound name the models that hear them.
        place.write("heard.jsonl", heard);
        let ran = place
            .run_with("init --train_file heard.jsonl --output heard.yaml --model_name_or_path", &[&model]);
        match family {
            "humanomni" | "omni" | "qwen2_audio" => {
                ran.ok();
                let text = std::fs::read_to_string(place.path("heard.yaml")).unwrap();
                assert!(text.contains("1 of 1 rows: 1 words; 1 with sound"), "{text}");
            }
            _ => {
                let parts = ["1 of 1 rows with sound", "Qwen/Qwen2.5-Omni-3B", "qwen2_audio", "humanomni"];
                ran.fails(1, &parts);
            }
        }
    }
}

#[test]
fn what_is_given_is_kept_and_nothing_is_overwritten() {
    let place = Place::new();
    let line = "init --model_name_or_path M --train_file rows.jsonl --output mine.yaml";
    let given = "--reward_funcs random --max_completion_length 32 --output_dir there --use_peft";
    let ran = place.run(&format!("{line} {given}")).ok();
    assert_eq!(ran.stdout, "mine.yaml\n");
    assert!(ran.stderr.contains("look at it, then run: omnigrpo train --config mine.yaml"), "{}", ran.stderr);
    let text = place.text("mine.yaml");
    for line in [
        "reward_funcs: [random]",
        "max_completion_length: 32",
        "output_dir: there",
        "use_peft: true",
        "learning_rate: 1.0e-5",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    assert!(text.starts_with("# yaml-language-server: $schema=omnigrpo.schema.json\n"), "{text}");
    let schema: Value = serde_json::from_str(&place.text("omnigrpo.schema.json")).unwrap();
    assert!(schema["properties"]["max_completion_length"].is_object());
    // A setting that the reward does not need is left out.
    assert!(!text.contains("accuracy_mode"), "{text}");
    place.run(line).fails(2, &["the file exists already", "mine.yaml", "`--output`"]);
    assert_eq!(place.text("mine.yaml"), text);
}

#[test]
fn what_is_missing_is_named() {
    let place = Place::new();
    // Without a terminal, nobody is asked.
    place.run("init").fails(2, &["`init` needs `--model_name_or_path`"]);
    place.run("init --model_name_or_path M").fails(2, &["`init` needs `--train_file`"]);
    place.write("none.jsonl", json!({"problem": "What?", "gold": "3"}).to_string());
    place
        .run("init --model_name_or_path M --train_file none.jsonl")
        .fails(1, &["no row has a ground truth", "gold", "--solution_column"]);
    assert!(!place.exists("omnigrpo.yaml"));
}

/// A large set of rows is split, and one pass over it is enough.
#[test]
fn lengths_follow_from_the_rows() {
    let place = Place::new();
    let row = |at: u64| {
        json!({"problem": format!("What is {at} + 1?"), "solution": (at + 1).to_string()}).to_string() + "\n"
    };
    place.write("many.jsonl", (0..1000).map(row).collect::<String>());
    place.copied_checkpoint("large");
    change(&place, "config.json", "max_position_embeddings", 16_384);
    place.run("init --model_name_or_path large --train_file many.jsonl --allow_text_only").ok();
    let text = place.text("omnigrpo.yaml");
    for line in [
        "num_train_epochs: 1",
        "val_split_ratio: 0.05",
        "eval_on_start: true",
        "per_device_train_batch_size: 8",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    let length = text.lines().find_map(|line| line.strip_prefix("max_completion_length: ")).unwrap();
    let length: Value = serde_json::from_str(length.split_whitespace().next().unwrap()).unwrap();
    assert_eq!(length, 320, "256 for thinking, and twice the longest answer");
}

/// Changes a number in a file of the checkpoint `large`.
fn change(place: &Place, file: &str, name: &str, value: u64) {
    let file = format!("large/{file}");
    let mut json: Value = serde_json::from_str(&place.text(&file)).unwrap();
    json[name] = value.into();
    place.write(&file, json.to_string());
}

#[test]
fn large_pictures_become_smaller() {
    let place = Place::new();
    place.copied_checkpoint("large");
    change(&place, "config.json", "max_position_embeddings", 16_384);
    change(&place, "preprocessor_config.json", "max_pixels", 12_845_056);
    // A bitmap of 2240 × 2240 pixels of one bit, 6400 tokens.
    let (start, side) = (62u32.to_le_bytes(), 2240u32.to_le_bytes());
    let info = [&40u32.to_le_bytes()[..], &side, &side, &[1, 0, 1, 0], &[0; 24]].concat();
    let bitmap = [b"BM", &[0; 8][..], &start, &info, &[0; 8], &[0; 280 * 2240]].concat();
    place.write("large.bmp", bitmap);
    let row = json!({"problem": "How many?", "solution": "3", "image": "large.bmp"});
    place.write("mine.jsonl", row.to_string());
    let line = "init --model_name_or_path large --train_file mine.jsonl";
    place.run(line).ok();
    let text = place.text("omnigrpo.yaml");
    let chosen = text.lines().find(|line| line.starts_with("max_pixels: 1003520 ")).unwrap();
    assert!(chosen.contains("# the longest prompt has 65"), "{chosen}");
    place.run("train --config omnigrpo.yaml --dry_run").ok();
    place.run(&format!("{line} --output mine.yaml --max_pixels 4000000")).ok();
    assert!(place.text("mine.yaml").contains("max_pixels: 4000000 "));
}

/// A run that exceeds the memory gets settings with which it fits. Those that the user gave stay.
#[cfg(target_os = "linux")]
#[test]
fn a_large_run_is_made_to_fit() {
    let place = Place::new();
    place.copied_checkpoint("large");
    // Weights of 0.5 GB, and 7 MB of activations for each token.
    change(&place, "config.json", "intermediate_size", 20_000);
    change(&place, "config.json", "num_hidden_layers", 30);
    let limited = |line: &str| crate::support::ran(&mut place.limited("-v 4000000", line));
    let small = "--num_generations 2 --per_device_train_batch_size 1 --threads 1";
    let line = format!("init --model_name_or_path large --init_weights 1 --train_file rows.jsonl {small}");
    limited(&line).ok();
    let text = place.text("omnigrpo.yaml");
    let chosen = text.lines().find(|line| line.starts_with("gradient_checkpointing: true ")).unwrap();
    assert!(chosen.ends_with("# so that the run fits into memory"), "{chosen}");
    limited("plan --config omnigrpo.yaml").ok();
    let kept = format!("{line} --gradient_checkpointing false");
    limited(&format!("{kept} --output mine.yaml")).ok();
    let text = place.text("mine.yaml");
    assert!(
        text.contains("gradient_checkpointing: false ") && text.contains("so that the run fits"),
        "{text}"
    );
    limited("plan --config mine.yaml").ok();
    limited(&format!("{kept} --max_completion_length 320 --output other.yaml"))
        .fails(1, &["this run does not fit into memory", "with `--gradient_checkpointing` it takes"]);
    assert!(!place.exists("other.yaml"));
}

/// Lines of rows that ask for a sum.
fn sums(count: u64) -> String {
    let row = |at: u64| json!({"problem": format!("What is {at} + 1?"), "solution": (at + 1).to_string()});
    (0..count).map(|at| row(at).to_string() + "\n").collect()
}

#[test]
fn enough_rows_are_held_out_or_the_file_says_what_few_tell() {
    let place = Place::new();
    for (count, line) in [
        (39, None),
        (100, Some("val_split_ratio: 0.25 ")),
        (200, Some("val_split_ratio: 0.25 ")),
        (1000, Some("val_split_ratio: 0.053 ")),
        (5000, Some("val_split_ratio: 0.04 ")),
    ] {
        place.write("sums.jsonl", sums(count));
        let file = format!("of-{count}.yaml");
        place
            .run(&format!(
                "init --model_name_or_path M --train_file sums.jsonl --allow_text_only --output {file}"
            ))
            .ok();
        let text = place.text(&file);
        let found = text.lines().find(|own| own.starts_with("val_split_ratio"));
        assert_eq!(found.is_some(), line.is_some(), "{count}: {text}");
        assert!(line.is_none_or(|line| found.unwrap().starts_with(line)), "{count}: {found:?}");
        assert_eq!(text.contains("eval_on_start: true"), line.is_some(), "{text}");
        assert_eq!(text.contains("# No row is held out"), line.is_none(), "{text}");
        // 150 of the 200 rows are trained on, eight in a step.
        assert_eq!(text.contains("steps of one pass: 19"), count == 200, "{text}");
        // Of 100 rows, 25 are held out. 1.96 · √(2 · ½ · ½ / 25) is 0.28.
        let warned = found.is_some_and(|own| own.contains("only 25 rows") && own.contains("below 28 points"));
        assert_eq!(warned, count == 100, "{found:?}");
    }
}

#[test]
fn a_run_is_prepared_for_a_card_that_is_elsewhere() {
    let place = Place::new();
    place.write("sums.jsonl", sums(400));
    let line = "init --model_name_or_path M --train_file sums.jsonl --allow_text_only --device cuda";
    let ran = place.run(&format!("{line} --gpu_memory 24GB")).ok();
    let card = "on a GPU with 165 TFLOP/s and 1008 GB/s (`--gpu_rates rtx-4090`)";
    assert!(ran.stderr.contains("the first result, after 20 steps, takes about"), "{}", ran.stderr);
    assert!(ran.stderr.contains(card), "{}", ran.stderr);
    let text = place.text("omnigrpo.yaml");
    assert!(text.contains("device: cuda") && text.contains(card), "{text}");
    assert!(!text.contains("\ngpu_memory") && !text.contains("within an hour"), "{text}");

    // The time of a plan is that of the rates: with half of each, it doubles.
    let time = |rates: &str| -> Value {
        place
            .run(&format!("plan --config omnigrpo.yaml --gpu_memory 24GB --gpu_rates {rates} --json p.json"))
            .ok();
        serde_json::from_str::<Value>(&place.text("p.json")).unwrap()["time"].clone()
    };
    let step = |rates: &str| time(rates)["with_completions"][0]["step_secs"].as_f64().unwrap();
    let (whole, half) = (step("100,1000"), step("50,500"));
    assert!(whole > 0.0 && (half / whole - 2.0).abs() < 1e-9, "{whole} {half}");
    assert!(step("h100") < step("rtx-4080"));
    let phases = time("100,1000")["with_completions"][0]["phases"].clone();
    let phase = |name: &str| phases[name].as_f64().unwrap();
    // All weights are trained: two products in the backward pass for each one forward.
    assert!((phase("backward") / phase("forward") - 2.0).abs() < 1e-9, "{phases}");
    place
        .run("plan --config omnigrpo.yaml --gpu_memory 24GB --gpu_rates 100")
        .fails(2, &["these are no rates of a GPU", "`rtx-4090`", "165,1008"]);
    for own in ["--gpu_memory 24GB", "--gpu_rates l4"] {
        place
            .run(&format!("plan --config omnigrpo.yaml --device cpu {own}"))
            .fails(2, &["has no effect in this run", "`device` is cpu"]);
    }

    // On a slow card, the run becomes smaller until its first result comes within an hour.
    let slow = format!("{line} --gpu_memory 24GB --gpu_rates 0.00015,0.005");
    let ran = place.run(&format!("{slow} --output slow.yaml")).ok();
    let quicker = |file: &str| -> Vec<String> {
        let text = place.text(file);
        let of_time = |own: &&str| own.ends_with("# so that the first result comes within an hour");
        text.lines()
            .filter(of_time)
            .map(|own| own.split_whitespace().take(2).collect::<Vec<_>>().join(" "))
            .collect()
    };
    assert_eq!(quicker("slow.yaml"), ["per_device_train_batch_size: 4"], "{}", ran.stderr);
    assert!(ran.stderr.contains("after 20 steps, takes about 4"), "minutes: {}", ran.stderr);
    // What is given stays, so another setting becomes smaller.
    place.run(&format!("{slow} --per_device_train_batch_size 8 --output kept.yaml")).ok();
    assert_eq!(quicker("kept.yaml"), ["num_generations: 4"]);
    // With less than any of them can do, the messages say so.
    let ran =
        place.run(&format!("{line} --gpu_memory 24GB --gpu_rates 0.000001,0.0001 --output late.yaml")).ok();
    assert_eq!(quicker("late.yaml").len(), 3);
    assert!(ran.stderr.contains(" h; a smaller model, fewer pixels or a GPU"), "{}", ran.stderr);
}

/// The changes that a newcomer makes first: another reward, and a flag that is already on the line.
#[test]
fn the_written_file_takes_changes_on_the_command_line() {
    let place = Place::new();
    place.write("sums.jsonl", rows("How many?", &["3", "12"], true));
    place.run("init --model_name_or_path M --train_file sums.jsonl").ok();
    assert!(place.text("omnigrpo.yaml").contains("accuracy_mode: [math]"));
    let line = "train --config omnigrpo.yaml --dry_run --reward_funcs random --max_steps 8 --max_steps 4";
    let ran = place.run(line).ok();
    for part in
        ["`accuracy_mode` ", "omnigrpo.yaml:", " is not used: ", "`--max_steps` is given several times"]
    {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    let printed = place.run(&line.replace("--dry_run", "--print_config")).ok();
    assert!(printed.stdout.contains("max_steps: 4 "), "{}", printed.stdout);
    // A line that has no effect in the file itself is still an error.
    let text =
        place.text("omnigrpo.yaml").replace("reward_funcs: [accuracy, format]", "reward_funcs: [random]");
    place.write("wrong.yaml", text);
    place
        .run("train --config wrong.yaml --dry_run")
        .fails(2, &["`accuracy_mode` has no effect", "wrong.yaml:"]);
}
