//! Translation of launch scripts, training scripts and files of settings of other trainers. The scripts have the form of those that
//! their projects publish.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

mod support;

use std::path::{Path, PathBuf};

use support::{Place, Ran, ran};

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts").join(name)
}

/// Copies a script into the place and translates it there.
fn translated(place: &Place, name: &str) -> Ran {
    std::fs::copy(script(name), place.path(name)).unwrap();
    ran(place.command(&format!("translate {name} --output out.yaml")).env("HOME", "/srv/me"))
}

/// Each translation is a file that `train` accepts.
#[test]
fn scripts_of_every_trainer_become_files_of_settings() {
    let mut names: Vec<String> = std::fs::read_dir(script(""))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 13);
    for name in names {
        let place = Place::new();
        translated(&place, &name).ok();
        let text = place.text("out.yaml");
        insta::assert_snapshot!(name.replace('.', "_"), text);
        let printed = place.run("train --config out.yaml --print_config").ok();
        // Nothing is ignored a second time.
        assert!(!printed.stdout.contains("have no counterpart"), "{name}: {}", printed.stdout);
    }
}

/// A translated run trains a step. Sizes of the tests replace those of the scripts.
#[test]
fn translated_runs_train() {
    for name in ["trl.yaml", "unsloth.py", "ms_swift.sh", "easy_r1.yaml", "verl_arrays.sh"] {
        let place = Place::new();
        translated(&place, name).ok();
        let small = "--model_name_or_path M --train_file rows.jsonl --output_dir out --max_steps 1 --num_generations 2 \
                     --per_device_train_batch_size 2 --gradient_accumulation_steps 1 --steps_per_generation 1 \
                     --max_completion_length 4 --max_prompt_length 4096 --reward_funcs random --reward_weights 1 --report_to none \
                     --load_in_4bit false --threads 1";
        let stderr = place.run(&format!("train --config out.yaml {small}")).ok().stderr;
        assert!(stderr.contains("step 1/1 |"), "{name}: {stderr}");
    }
}

/// The settings of a file that the script names are included; the script's own replace them.
#[test]
fn a_file_that_the_script_names_is_read() {
    let place = Place::new();
    std::fs::create_dir_all(place.path("project/examples")).unwrap();
    std::fs::copy(script("easy_r1.yaml"), place.path("project/examples/config.yaml")).unwrap();
    std::fs::copy(script("easy_r1.sh"), place.path("project/examples/run.sh")).unwrap();
    let text = place.run("translate project/examples/run.sh").ok().stdout;
    for line in [
        "# Settings of examples/config.yaml, which the script names, are included.",
        "model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct",
        "max_completion_length: 512",
        "beta: 0.02",
    ] {
        assert!(text.contains(line), "{line} in\n{text}");
    }
    assert!(!text.contains("Qwen2.5-VL-3B"), "{text}");
}

#[test]
fn files_that_start_no_training_are_refused() {
    let place = Place::new();
    for (name, text, parts) in [
        ("a.sh", "echo hello\n", &["the file starts no GRPO training", "`swift rlhf …`"][..]),
        ("b.sh", "if then (\n", &["the file is no shell script"]),
        (
            "c.sh",
            "trl grpo --beta 0.1\ntrl grpo --beta 0.2\n",
            &["the file starts several trainings", "2 commands"],
        ),
        ("d.py", "print('hello')\n", &["the script configures no GRPO training"]),
        ("e.py", "def (\n", &["the file is no Python script"]),
        ("f.yaml", "- a\n- b\n", &["the file has no settings"]),
        ("g.yaml", "a: [\n", &["the file is no YAML file of settings"]),
    ] {
        place.write(name, text);
        place.run(&format!("translate {name}")).fails(2, parts);
    }
    place.run("translate missing.sh").fails(2, &["cannot read the file of settings", "missing.sh"]);
    place.write("h.sh", "trl grpo --beta 0.1\n");
    place.run("translate h.sh --output h.sh").fails(2, &["the output would overwrite the input"]);
    // The script is never run.
    place.write("i.sh", "touch ran\ntrl grpo --beta $(touch ran)0.1\n");
    place.run("translate i.sh").ok();
    assert!(!place.exists("ran"));
    // A value cannot leave its comment.
    place.write("j.sh", "trl grpo --use_vllm 'x\nbeta: 9' --optim 'y\rbeta: 8'\n");
    let text = place.run("translate j.sh").ok().stdout;
    assert!(!text.lines().flat_map(|line| line.split('\r')).any(|line| line.starts_with("beta")), "{text}");
    place.write("k.sh", "a\n".repeat(1 << 18));
    place.run("translate k.sh").fails(2, &["too large", "at most 262144 bytes"]);
    place.write("l.sh", format!("trl grpo{}", " --x".repeat(5000)));
    place.run("translate l.sh").fails(2, &["too many settings", "at most 4096"]);
}
