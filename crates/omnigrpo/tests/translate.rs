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

/// A token in a script appears neither in the translation nor on the terminal.
#[test]
fn secrets_are_not_copied() {
    const SECRET: &str = "hf_0123456789abcdefghijklmnopqrstuvwx";
    let scripts = [
        ("a.sh", format!("trl grpo --hub_token {SECRET} --push_to_hub --beta 0.1\n")),
        (
            "b.sh",
            format!(
                "export WANDB_API_KEY={SECRET}\nHF_TOKEN={SECRET} trl grpo --beta 0.1 --nothing_token {SECRET}\n"
            ),
        ),
        (
            "c.sh",
            format!("TOKEN={SECRET}\ntrl grpo --beta 0.1 --hub_token $TOKEN --wandb_api_key=\"$TOKEN\"\n"),
        ),
        (
            "d.sh",
            format!(
                "trl grpo --beta 0.1 --dataset_name https://me:{SECRET}@example.com/rows --hub_token {SECRET} --hub_token {SECRET}\n"
            ),
        ),
        ("e.yaml", format!("beta: 0.1\nhub_token: {SECRET}\nwandb_api_key: {SECRET}\n")),
        (
            "f.py",
            format!(
                "config = GRPOConfig(beta=0.1, hub_token='{SECRET}', api_key=read('{SECRET}'), token=os.environ.get('A', '{SECRET}'))\n\
                 GRPOTrainer(model='m', args=config, hub_token=f'{SECRET}')\n\
                 model = AutoModel.from_pretrained('m', token='{SECRET}')\n"
            ),
        ),
    ];
    for (name, text) in scripts {
        let place = Place::new();
        place.write(name, text);
        let Ran { stdout, stderr, .. } = place.run(&format!("translate {name}")).ok();
        assert!(stdout.contains("beta: 0.1"), "{name}: {stdout}");
        assert!(!stdout.contains(SECRET) && !stderr.contains(SECRET), "{name}:\n{stdout}\n{stderr}");
    }
}

/// Commands that share a long variable, and variables that repeat each other, need little memory.
#[test]
fn a_hostile_script_needs_little_memory() {
    let long = "9".repeat(100 << 10);
    let doubled: String = (0..60).map(|at| format!("V{}=\"$V{at}$V{at}\"\n", at + 1)).collect();
    let scripts = [
        ("a.sh", format!("NPROC_PER_NODE={long}\n{}trl grpo --beta 0.1\n", "a\n".repeat(60 << 10)), Ok(())),
        (
            "b.sh",
            format!("V0=xxxxxxxx\n{doubled}trl grpo --beta 0.1 --run_name $V60\n"),
            Err("the file is no shell script"),
        ),
        (
            "c.py",
            format!(
                "a = '{}'\n{}GRPOConfig(beta=0.1)\n",
                "x".repeat(1000),
                "b = [a, a, a]\n".repeat(10 << 10)
            ),
            Ok(()),
        ),
    ];
    for (name, text, expected) in scripts {
        let place = Place::new();
        place.write(name, text);
        let mut limited = place.limited("-v 1500000", &format!("translate {name}"));
        match expected {
            Ok(()) => drop(ran(&mut limited).ok()),
            Err(why) => drop(ran(&mut limited).fails(2, &[why])),
        }
    }
}
