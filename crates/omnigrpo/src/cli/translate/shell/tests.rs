use super::*;

fn script(text: &str) -> Script {
    read(text, Path::new("/srv/project/run/train.sh"), "/srv/me", &["NPROC_PER_NODE", "A"]).unwrap()
}

fn words(text: &str) -> Vec<Vec<String>> {
    script(text).lines.into_iter().map(|line| line.words).collect()
}

fn owned<const N: usize>(words: [&str; N]) -> Vec<String> {
    words.map(str::to_owned).to_vec()
}

#[test]
fn words_are_those_that_a_shell_would_pass() {
    let script = r#"
        set -x   # a comment
        export NAME='a b'
        MODEL=Qwen/Qwen2.5-VL-3B-Instruct
        ENGINE=${1:-vllm}
        args="--beta 0.1 \
            --name $NAME"
        args+=" --more"
        torchrun --nproc_per_node="8" \
            train.py $args --model "$MODEL" --run "${NAME}-x" --home ~/data/$MODEL --engine $ENGINE \
            --logger=['console','wandb'] --empty "" --list "q", "v" --plain a\ b "$@" --spaces "${NONE:-x y}" \
            --epochs 2 > log.txt 2>&1
    "#;
    let lines = words(script);
    let expected = owned([
        "torchrun",
        "--nproc_per_node=8",
        "train.py",
        "--beta",
        "0.1",
        "--name",
        "a",
        "b",
        "--more",
        "--model",
        "Qwen/Qwen2.5-VL-3B-Instruct",
        "--run",
        "a b-x",
        "--home",
        "/srv/me/data/Qwen/Qwen2.5-VL-3B-Instruct",
        "--engine",
        "vllm",
        "--logger=[console,wandb]",
        "--empty",
        "",
        "--list",
        "q,",
        "v",
        "--plain",
        "a b",
        "--spaces",
        "x y",
        "--epochs",
        "2",
    ]);
    assert_eq!(lines, [owned(["set", "-x"]), expected]);
}

#[test]
fn arrays_conditions_loops_and_functions_are_read() {
    let text = r#"
        DATA=(
            data.a=1   # one
            "data.b=x y"
        )
        DEVICE=${DEVICE:-gpu}
        if [ -n "$DEBUG" ]; then FLAGS=(--debug true); else FLAGS=(--plain); fi
        if [[ $DEVICE == npu* || "$DEVICE" = cpu ]]; then FLAGS+=(--npu); elif [ "$DEVICE" = gpu ]; then FLAGS+=(--gpu); fi
        case "$1" in
            a) FLAGS=(--case);;
            *) FLAGS+=(--other);;
        esac
        for SIZE in 3B 7B; do echo "$SIZE"; done
        false || FLAGS+=(--failed)
        [ -z "$NONE" ] && FLAGS+=(--none)
        run() { python3 -m verl.trainer.main_ppo "${DATA[@]}" ${FLAGS[@]} $SIZE "$1" ${#FLAGS[@]}; }
        run here
        never() { echo "${FLAGS[1]}"; }
    "#;
    let lines = words(text);
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[0], owned(["echo", "3B"]));
    let flags =
        ["data.a=1", "data.b=x y", "--plain", "--gpu", "--other", "--failed", "--none", "3B", "here", "5"];
    assert_eq!(lines[1][3..], owned(flags));
    assert_eq!(lines[2], owned(["echo", "--gpu"]));
    assert!(script(text).notes.is_empty());
}

#[test]
fn what_depends_on_the_machine_is_named() {
    for (text, note, last) in [
        (
            "if [ -d /data ]; then X=1; else X=2; fi\nrun $X",
            "Line 1: `[ -d /data ]` cannot be decided here",
            "1",
        ),
        ("X=0\n[ -f a ] || X=1\nrun $X", "Line 2: `[ -f a ]` cannot be decided here", "0"),
        (
            "X=0\nif grep -q x file\nthen X=1; fi\nrun $X",
            "Line 2: `grep -q x file` cannot be decided here",
            "1",
        ),
        ("X=0\ncase $(uname) in a) X=1;; esac\nrun $X", "Line 2: `$(uname)` cannot be decided here", "0"),
        ("X=$(hostname)\nif [ \"$X\" = a ]; then X=1; fi\nrun $X", "Line 2: `[ \"$X\" = a ]` cannot", "1"),
        (
            "for X in 1 2 3; do\n swift rlhf --a $X --b --c; done\nrun $X",
            "Line 1: the loop runs 3 times",
            "1",
        ),
        ("cd src/x\nrun 1", "changes to the folder src/x", "1"),
    ] {
        let script = script(text);
        assert!(script.notes.len() == 1 && script.notes[0].contains(note), "{text}: {:?}", script.notes);
        assert_eq!(script.lines.last().unwrap().words.last().unwrap(), last, "{text}");
    }
    // A folder that is made changes nothing, and neither does a condition without a branch that sets something.
    for text in ["if [ ! -d out ]; then mkdir -p out; fi\nrun", "[ -d out ] || mkdir out\nrun"] {
        assert_eq!(script(text).notes, [] as [&str; 0]);
    }
}

#[test]
fn what_is_unknown_stays_as_it_is_written() {
    let text = "run --name $(date +'%s)')-$UNSET --dir \"${OUT}/x\" $((X + 1)) `a b` ${X%.*} <(a b)";
    let expected = [
        "run",
        "--name",
        "$(date +'%s)')-$UNSET",
        "--dir",
        "${OUT}/x",
        "$((X + 1))",
        "`a b`",
        "${X%.*}",
        "<( a b )",
    ];
    assert_eq!(words(text), [owned(expected)]);
    // It is one word also after it went through a variable.
    let text = "NAME=${NAME:-x_$(date +%Y %m)}\nrun --run_name $NAME --log \"a $(date \"+%s %m\") b\"";
    let expected = ["run", "--run_name", "x_$(date +%Y %m)", "--log", "a $(date \"+%s %m\") b"];
    assert_eq!(words(text), [owned(expected)]);
    assert_eq!(
        words("run --out <OUT> \\\n  --model <A_B> --x 1"),
        [owned(["run", "--out", "<OUT>", "--model", "<A_B>", "--x", "1"])]
    );
}

#[test]
fn paths_patterns_and_numbers_are_filled_in() {
    for (text, expected) in [
        ("R=\"$( cd \"$( dirname \"${BASH_SOURCE[0]}\" )/..\" && pwd )\"\nrun $R/x", "/srv/project/x"),
        ("R=$(cd $(dirname $0); pwd)\nrun $R", "/srv/project/run"),
        ("R=$(dirname \"$(realpath \"$0\")\")\nrun $R", "/srv/project/run"),
        ("R=`dirname $0`\nrun $R", "/srv/project/run"),
        ("A=\"$(pwd)\"\nrun $A", "$(pwd)"),
        ("M=org/Model-7B.tar\nrun ${M##*/} ", "Model-7B.tar"),
        ("M=org/Model-7B.tar\nrun ${M%.*}", "org/Model-7B"),
        ("M=a.b.c\nrun ${M%%.*}", "a"),
        ("M=a.b.c\nrun ${M#*.}", "b.c"),
        ("M=a.b.c\nrun ${M//./_}", "a_b_c"),
        ("M=a.b.c\nrun ${M/./_}", "a_b.c"),
        ("M=Abc\nrun ${M,,}${M^^}", "abcABC"),
        ("M=abc\nrun ${#M}", "3"),
        ("P=4; L=8\nrun $((P * (L + $P) / 2))", "24"),
        ("run $((1 / 0))", "$((1 / 0))"),
        ("B=$(basename /a/b.sh .sh)\nrun $B", "b"),
        ("E=$(echo a b)\nrun \"$E\"", "a b"),
        ("X=1\nrun ${X:+--flag}${Y:+--none}", "--flag"),
        ("C='run --a \"b c\"'\neval $C", "b c"),
        ("srun --x bash -c \"run 'b c'\"", "b c"),
    ] {
        assert_eq!(words(text).last().unwrap()[1..].join(" ").trim_start_matches("--a "), expected, "{text}");
    }
}

#[test]
fn texts_for_a_command_are_no_commands() {
    let text = "cat <<EOF > config.yaml\ntrl grpo --beta 1\nit's ((((((((((((( EOF\nEOF\ncat <<-'E'\n\ta $(\n\tE\necho <<<text done";
    assert_eq!(words(text), [owned(["cat"]), owned(["cat"]), owned(["echo", "done"])]);
}

#[test]
fn variables_of_a_command_are_kept() {
    let expected =
        HashMap::from([("NPROC_PER_NODE", "8"), ("A", "1")].map(|(n, v)| (n.to_owned(), v.to_owned())));
    for text in [
        "export A=1\nNPROC_PER_NODE=8 B=2 \\\nswift rlhf --model x",
        "A=1 \\\n  NPROC_PER_NODE=8 \\\nswift rlhf --model x",
        "A=1\nNPROC_PER_NODE=8\nswift rlhf --model x",
        "C=3 \\\nA=1 \\\nD=4 \\\nNPROC_PER_NODE=$((4 * 2)) swift rlhf --model x",
        "export C=3 A=1 NPROC_PER_NODE=8; swift rlhf --model x",
    ] {
        let lines = script(text).lines;
        assert_eq!(lines[0].words, ["swift", "rlhf", "--model", "x"]);
        assert_eq!(lines[0].environment, expected, "{text}");
    }
}

#[test]
fn text_that_is_no_script_is_refused() {
    let doubled = "a=xxxxxxxxxxxxxxxx\n".to_owned() + &"a=$a$a\n".repeat(64);
    let elements = format!("a=({})\n{}", "'' ".repeat(4000), "run \"${a[@]}\"\n".repeat(4000));
    let calls: String = (1..12).map(|n| format!("f{n}() {{ f{0}; f{0}; f{0}; f{0}; }}\n", n - 1)).collect();
    let calls = format!("f0() {{ run; }}\n{calls}f11");
    let itself = "f() { f; }\nf";
    for (text, reason) in [
        ("if then (", "its last command is incomplete or out of place"),
        ("\nfi", "its last command is incomplete or out of place"),
        ("then x", "line 1: the command is incomplete or out of place"),
        ("run 'a", "line 1: unterminated single quote"),
        ("run \"a", "line 1: unterminated double quote"),
        ("run $(a", "line 1: unterminated expansion"),
        ("A=(a", "its last command is incomplete or out of place"),
        ("cat <<E\n", "unterminated here document"),
        (&doubled, "its words have more than 4194304 bytes after variables are filled in"),
        (&elements, "its words have more than 4194304 bytes after variables are filled in"),
        (&"a\n".repeat(5 << 20), "it has more than 1048576 bytes"),
        (itself, "more than 16 calls, texts or values in one another"),
        (&calls, "it has more than 131072 commands after its functions are filled in"),
        ("run 99999999999999>x", "its words are too unusual to read"),
        ("a=\u{e000}", "it has characters for private use"),
    ] {
        let error = read(text, Path::new("a.sh"), "", &[]).unwrap_err();
        assert!(error.contains(reason), "{text:.60}: {error}");
    }
}

#[test]
fn deep_scripts_are_refused_at_once() {
    let started = std::time::Instant::now();
    let deep = ["$(", "((", "\"$(", "${", "${A:-", "<(", "( ", "{ ", "$((", "a=(", "[[ ( ", "f() { ", "$("];
    for part in deep {
        for many in [9, 20_001] {
            let text = format!("run {0}\n{0}", part.repeat(many));
            let error = read(&text, Path::new("a.sh"), "", &[]).unwrap_err();
            assert!(error.contains("more than 8 brackets in brackets"), "{part}: {error}");
        }
    }
    for part in ["if x; then ", "for x in a; do ", "while x; do ", "! ", "a && ", "x | ", "`", "coproc "] {
        drop(read(&part.repeat(20_001), Path::new("a.sh"), "", &[]));
    }
    // Quotes hide no brackets.
    let hidden = "( ')' ".repeat(200);
    assert!(read(&hidden, Path::new("a.sh"), "", &[]).unwrap_err().contains("brackets"));
    assert!(started.elapsed() < PATIENCE, "{:?}", started.elapsed());
}

/// Scripts with random changes are read or refused, each in a short time.
#[test]
fn changed_scripts_are_read_or_refused() {
    const SCRIPT: &str = r#"#!/bin/bash
TOP="$( cd "$( dirname "${BASH_SOURCE[0]}" )/.." && pwd )"; N=$((2 * 4))
ARGS=(--a "${A:-x y}" --b '[1,2]' [3]=z)
if [[ -n "$B" && $N -gt 4 ]] || [ "$1" = on ]; then ARGS+=(--c "$(date +%Y)"); elif test -d x; then :; fi
case "${TOP##*/}" in p*|q) for X in 1 2; do echo "$X" `y`; done ;; *) exit 1;; esac
run() { torchrun --nproc_per_node="${N}" "$@" 2>&1 | tee log; }
cat <<END > c.yaml
it's $N
END
run train.py "${ARGS[@]}" --d ${TOP//\//_} <(sort x) && echo 'done' || ! false
"#;
    const PIECES: [&str; 16] = [
        "\"",
        "'",
        "$(",
        ")",
        "${",
        "}",
        "((",
        "))",
        "`",
        "\\",
        "\n",
        "<<E\n",
        ";;",
        "~9",
        "99999999999>",
        "é",
    ];
    let mut state = 1_u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let started = std::time::Instant::now();
    let mut read_whole = 0;
    for _ in 0..506 {
        let mut text: Vec<char> = SCRIPT.chars().collect();
        for _ in 0..=random(6) {
            let at = random(text.len());
            match random(3) {
                0 => drop(text.remove(at)),
                1 => drop(text.splice(at..at, PIECES[random(PIECES.len())].chars())),
                _ => {
                    let end = (at + random(40)).min(text.len());
                    let part = text[at..end].to_vec();
                    drop(text.splice(at..at, part));
                }
            }
        }
        let text: String = text.into_iter().collect();
        read_whole += usize::from(read(&text, Path::new("a.sh"), "", &[]).is_ok());
    }
    assert!((50..500).contains(&read_whole), "{read_whole}");
    assert!(started.elapsed() < 3 * PATIENCE, "{:?}", started.elapsed());
}
