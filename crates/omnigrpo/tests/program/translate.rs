//! Translation of launch scripts, training scripts and files of settings of other trainers. The scripts have the form of those that
//! their projects publish.

use std::path::{Path, PathBuf};

use crate::support::{Place, Ran, ran};

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
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| entry.file_name().into_string().unwrap())
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

/// A setting of a table: its name and its value, without the reason behind it.
type Setting = (String, String);

/// The expected settings of a script, and the lines of the block that names what is left out.
#[derive(Clone, Default)]
struct Expected {
    settings: Vec<Setting>,
    lost: Vec<String>,
}

/// Reads the tables of expected settings, by the name in their head.
fn tables() -> Vec<(String, Expected)> {
    let text = std::fs::read_to_string(script("published/expected.txt")).unwrap();
    let mut tables: Vec<(String, Expected)> = Vec::new();
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let line = line.split("  # ").next().unwrap();
        if let Some(head) = line.strip_prefix('[').filter(|_| line.contains(']')) {
            let (name, base) = head.split_once(']').unwrap();
            let base = match base.trim() {
                "" => Expected::default(),
                base => tables
                    .iter()
                    .find(|(known, _)| known == base)
                    .unwrap_or_else(|| panic!("no table {base}"))
                    .1
                    .clone(),
            };
            tables.push((name.to_owned(), base));
            continue;
        }
        let table = &mut tables.last_mut().unwrap().1;
        if let Some(lost) = line.strip_prefix("lost: ") {
            // A script replaces the line of its trainer about the same setting.
            let about = lost.split(' ').next().unwrap();
            if about.contains('.') {
                table.lost.retain(|own| own.split(' ').next() != Some(about));
            }
            table.lost.push(lost.to_owned());
            continue;
        }
        let (name, value) = line.split_once(' ').unwrap();
        table.settings.retain(|(own, _)| own != name);
        if value != "-" {
            table.settings.push((name.to_owned(), value.to_owned()));
        }
    }
    tables
}

/// Returns the settings of a file of settings, but their comments.
fn settings(text: &str) -> Vec<Setting> {
    let setting = |line: &str| {
        let (name, value) = line.split_once(": ")?;
        // A comment stands behind a number sign; texts with one are in quotes.
        let end = if let Some(text) = value.strip_prefix('"') {
            let quote = text.match_indices('"').find(|(at, _)| !text[..*at].ends_with('\\'));
            quote.map_or(value.len(), |(at, _)| at + 2)
        } else {
            value.find(" #").unwrap_or(value.len())
        };
        Some((name.to_owned(), value[..end].trim_end().to_owned()))
    };
    text.lines()
        .filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()))
        .filter_map(setting)
        .collect()
}

/// Returns a value in one form: numbers by their value, without quotes around a text.
fn normal(value: &str) -> String {
    let one = |text: &str| {
        let text = text.trim();
        let bare = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
        bare.parse::<f64>().map_or_else(|_| bare.to_owned(), |number| number.to_string())
    };
    match value.strip_prefix('[').and_then(|list| list.strip_suffix(']')) {
        Some(list) => format!("[{}]", list.split(',').map(one).collect::<Vec<_>>().join(", ")),
        None => one(value),
    }
}

/// Returns the lines of a block of comments.
fn block(text: &str, title: &str) -> Vec<String> {
    let lines = text.lines().skip_while(|line| !line.contains(title)).skip(1);
    lines.map_while(|line| line.strip_prefix("#   ")).map(str::to_owned).collect()
}

/// Scripts of our own with the constructs, flags and values of published ones have exactly the settings that were derived from
/// those by hand, also as `train` reads them. What is called without effect has none there.
#[test]
fn settings_of_published_scripts_are_those_of_the_tables() {
    let is_file = |name: &String| [".sh", ".py", ".yaml"].iter().any(|end| name.ends_with(end));
    let scripts: Vec<(String, Expected)> = tables().into_iter().filter(|(name, _)| is_file(name)).collect();
    assert!(scripts.len() >= 30, "{}", scripts.len());
    let mut wrong = Vec::new();
    let (mut count, mut without) = (0, 0);
    for (name, expected) in &scripts {
        let place = Place::new();
        std::fs::create_dir_all(place.path("run/examples")).unwrap();
        for entry in std::fs::read_dir(script("published/examples")).unwrap() {
            let file = entry.unwrap();
            std::fs::copy(file.path(), place.path("run/examples").join(file.file_name())).unwrap();
        }
        std::fs::copy(script("published").join(name), place.path("run").join(name)).unwrap();
        let top = std::fs::canonicalize(place.path("")).unwrap().display().to_string();
        let mut command = place.command(&format!("translate {name} --output out.yaml"));
        // The folder of the script, as the system names it.
        let out = ran(command.current_dir(Path::new(&top).join("run")).env("HOME", "/srv/me")).ok();
        let text = place.text("run/out.yaml");
        let found: Vec<Setting> = settings(&text);
        for (setting, value) in &expected.settings {
            count += 1;
            let value = value.replace("PLACE", &top);
            let own = found.iter().find(|(own, _)| own == setting).map(|(_, own)| own.as_str());
            if own.map(normal) != Some(normal(&value)) {
                wrong
                    .push(format!("{name}: {setting}: expected {value}, found {}", own.unwrap_or("nothing")));
            }
        }
        for (setting, value) in &found {
            if expected.settings.iter().all(|(own, _)| own != setting) {
                wrong.push(format!("{name}: {setting}: expected nothing, found {value}"));
            }
        }
        let lost = block(&text, "Changes training there");
        for line in &expected.lost {
            if !lost.iter().any(|own| own.contains(line.as_str())) {
                wrong.push(format!("{name}: not named: {line}"));
            }
        }
        for line in &lost {
            // The block is on the terminal as well.
            assert!(out.stderr.contains(line.as_str()), "{name}: {line}\n{}", out.stderr);
            if !expected.lost.iter().any(|own| line.contains(own.as_str())) {
                wrong.push(format!("{name}: not expected: {line}"));
            }
        }
        // `train` reads the same, and what is called without effect changes nothing.
        let print = |more: &[String]| {
            let mut command = place.command("train --config out.yaml --print_config");
            ran(command.args(more).current_dir(Path::new(&top).join("run"))).ok().stdout
        };
        let read = settings(&print(&[]));
        for (setting, value) in &found {
            let own = read.iter().find(|(own, _)| own == setting).map(|(_, own)| normal(own));
            let is_same = own.is_none_or(|own| own == normal(value) || setting == "resume_from_checkpoint");
            if !is_same {
                wrong.push(format!("{name}: `train` reads {setting} differently"));
            }
        }
        let mut flags = Vec::new();
        for line in block(&text, "Without a counterpart and without effect") {
            // A flag of the command line is stronger than the file, so it would not be without effect there.
            if line.ends_with("is given") {
                continue;
            }
            let written = line.split(": ").next().unwrap();
            let (flag, value) = written.split_once(' ').unwrap_or((written, ""));
            // The batch of a rollout has a meaning only beside that of an update, which the file has under another name.
            if matches!(flag, "data.train_batch_size" | "data.rollout_batch_size") {
                continue;
            }
            without += 1;
            if flag.contains('.') && !flag.starts_with("--") {
                flags.push(format!("{flag}={value}"));
            } else if flag.starts_with("--") {
                flags.extend([flag.to_owned(), value.to_owned()]);
            }
        }
        if settings(&print(&flags)) != read {
            wrong.push(format!("{name}: a setting that is called without effect has one: {flags:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {count} settings:\n{}", wrong.len(), wrong.join("\n"));
    assert!(count > 900 && without > 200, "{count} {without}");
}

/// A setting that changes training without a counterpart fails under `--strict`. The file is written in any case.
#[test]
fn a_strict_translation_is_complete() {
    let place = Place::new();
    let lines = "trl grpo --model_name_or_path M --dataset_name rows.jsonl --output_dir out --reward_funcs accuracy_reward";
    place.write("whole.sh", lines);
    let whole = place.run("translate whole.sh --strict").ok();
    assert!(whole.stdout.contains("reward_funcs: [math]"), "{}", whole.stdout);
    place.write("part.sh", format!("{lines} --optim lion"));
    let part = place.run("translate part.sh --strict --output part.yaml");
    let part =
        part.fails(1, &["the translation is incomplete", "1 line at its top", "`--optim` is unsupported"]);
    assert!(place.text("part.yaml").contains("reward_funcs: [math]"), "{}", part.stderr);
    place.run("translate part.sh").ok();
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
                     --load_in_4bit false --nproc_per_node 1 --threads 1";
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
    // A flag with dashes is the setting of the file.
    place.write("base.yaml", "model_name_or_path: m\ndataset_name: d\nnum_generations: 16\nbeta: 0.1\n");
    place.write("trl.sh", "trl grpo --config base.yaml --num-generations 4\n");
    let text = place.run("translate trl.sh").ok().stdout;
    assert!(text.contains("\nnum_generations: 4") && text.contains("\nbeta: 0.1"), "{text}");
    assert!(!text.contains("given twice") && !text.contains("16"), "{text}");
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
    assert!(
        !text
            .lines()
            .flat_map(|line| line.split('\r'))
            .any(|line| line.starts_with("beta: 9") || line.starts_with("beta: 8")),
        "{text}"
    );
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
