//! Launch scripts of shells: the words of each command, with variables and arrays of the script filled in.
//!
//! The script is read and never run. A condition is not evaluated: its first branch counts, and a loop is read once. The output of
//! a command and a variable that the script does not set stay in the text as they are written. Of the environment, only `HOME` is
//! used.

use std::collections::HashMap;

/// Maximum number of bytes of all words and values together. Variables can repeat each other, so a short script can have long words.
const MAX_EXPANDED: usize = 1 << 22;
/// Maximum depth of defaults in defaults, as in `${A:-${B:-x}}`.
const MAX_DEPTH: usize = 16;

/// A command of a script.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Variables of [`commands`] that are set for the command or before it.
    pub environment: HashMap<String, String>,
    /// Words after expansion.
    pub words: Vec<String>,
}

/// Returns the commands of a script in their order, each with its values of the variables `kept`.
///
/// # Errors
/// Returns the reason why the text is no script.
pub fn commands(text: &str, home: &str, kept: &[&str]) -> Result<Vec<Line>, String> {
    let variables = HashMap::from([("HOME".to_owned(), vec![home.to_owned()])]);
    let mut shell = Shell { variables, kept, lines: Vec::new(), open: Vec::new(), expanded: 0 };
    shell.script(&mut Text { rest: text, line: 1 })?;
    match shell.open.pop() {
        Some(Block { word, line, .. }) => Err(format!("line {line}: `{word}` has no end")),
        None => Ok(shell.lines),
    }
}

/// Text that is not read yet.
struct Text<'t> {
    rest: &'t str,
    line: usize,
}

impl<'t> Text<'t> {
    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.skip(c.len_utf8());
        Some(c)
    }

    /// Moves by a number of bytes, which ends at a character, and returns them.
    fn skip(&mut self, bytes: usize) -> &'t str {
        let (passed, rest) = self.rest.split_at_checked(bytes).unwrap_or((self.rest, ""));
        self.line += passed.bytes().filter(|&byte| byte == b'\n').count();
        self.rest = rest;
        passed
    }

    fn eat(&mut self, start: &str) -> bool {
        let found = self.rest.starts_with(start);
        if found {
            self.skip(start.len());
        }
        found
    }

    /// Returns the text before `end` and moves behind it.
    fn until(&mut self, end: char, opened: &str) -> Result<&'t str, String> {
        let found = self.rest.find(end).ok_or_else(|| format!("line {}: {opened} has no end", self.line))?;
        let text = self.skip(found);
        self.next();
        Ok(text)
    }

    /// Returns the text before the bracket that closes one which was just read. Quotes and nested brackets count.
    fn balanced(&mut self, open: char, close: char) -> Result<&'t str, String> {
        let unclosed = format!("line {}: `{open}` has no `{close}`", self.line);
        let (mut depth, mut quote) = (0_usize, None);
        let mut chars = self.rest.char_indices();
        while let Some((at, c)) = chars.next() {
            match (quote, c) {
                (None | Some('"'), '\\') => drop(chars.next()),
                (Some(q), c) if q == c => quote = None,
                (Some(_), _) => {}
                (None, '\'' | '"' | '`') => quote = Some(c),
                (None, c) if c == open => depth += 1,
                (None, c) if c == close && depth == 0 => {
                    let text = self.skip(at);
                    self.next();
                    return Ok(text);
                }
                (None, c) if c == close => depth -= 1,
                _ => {}
            }
        }
        Err(unclosed)
    }
}

/// A part of a script that `fi`, `done` or `esac` ends.
struct Block {
    word: String,
    line: usize,
    /// True while the branch that is read does not count.
    skips: bool,
}

/// Text that a parameter becomes: one text, or the elements of an array.
type Values = Vec<String>;

struct Shell<'k> {
    /// Values of variables; an array has any number of them.
    variables: HashMap<String, Values>,
    kept: &'k [&'k str],
    lines: Vec<Line>,
    open: Vec<Block>,
    expanded: usize,
}

/// A command while its words are read.
#[derive(Default)]
struct Command {
    line: Line,
    /// True if a word of the command was read, even if it became none.
    begun: bool,
    /// True behind `export` and similar words, whose words are assignments.
    declares: bool,
    /// Assignments before the words.
    assigned: Vec<(String, Values)>,
    /// Ends of the texts that follow the line.
    here: Vec<(String, bool)>,
}

/// Words of a word, of which the last may go on.
#[derive(Default)]
struct Words {
    words: Vec<String>,
    open: Option<String>,
}

impl Words {
    fn push(&mut self, text: &str) {
        self.open.get_or_insert_default().push_str(text);
    }

    /// Adds text whose spaces separate words.
    fn split(&mut self, text: &str) {
        for part in text.split_inclusive(char::is_whitespace) {
            let word = part.trim_end();
            if !word.is_empty() {
                self.push(word);
            }
            if word.len() < part.len() {
                self.words.extend(self.open.take());
            }
        }
    }

    /// Adds the elements of a quoted array: the first continues the word, and the last may go on.
    fn elements(&mut self, values: &[String]) {
        for (at, value) in values.iter().enumerate() {
            if at > 0 {
                self.words.extend(self.open.take());
            }
            self.push(value);
        }
    }

    fn end(mut self) -> Vec<String> {
        self.words.extend(self.open);
        self.words
    }
}

impl Shell<'_> {
    fn script(&mut self, text: &mut Text<'_>) -> Result<(), String> {
        let mut command = Command::default();
        // A command behind `||` runs only if the command before it fails.
        let mut fails = false;
        let mut here = Vec::new();
        while let Some(c) = text.peek() {
            match c {
                '\n' => {
                    here.append(&mut command.here);
                    self.finish(&mut command, &mut fails, false);
                    text.next();
                    for (end, tabs) in here.drain(..) {
                        skip_here(text, &end, tabs)?;
                    }
                }
                c if c.is_whitespace() => drop(text.next()),
                '#' => drop(text.skip(text.rest.find('\n').unwrap_or(text.rest.len()))),
                ';' | '&' | '|' | '(' | ')' => {
                    here.append(&mut command.here);
                    if text.eat("&>") {
                        text.eat(">");
                        self.target(text)?;
                        continue;
                    }
                    let or = text.eat("||");
                    if !or {
                        let and = text.eat("&&");
                        if !and && text.eat("((") {
                            text.balanced('(', ')')?;
                            text.eat(")");
                        } else if !and {
                            text.next();
                        }
                    }
                    // `name()` begins a function, which is read where it is defined.
                    if c == '(' && text.rest.trim_start().starts_with(')') {
                        command = Command::default();
                    }
                    self.finish(&mut command, &mut fails, or);
                }
                '<' | '>' if !text.rest.starts_with("<(") && !text.rest.starts_with(">(") => {
                    if text.eat("<<<") {
                        self.target(text)?;
                    } else if text.eat("<<") {
                        let tabs = text.eat("-");
                        let end = self.target(text)?;
                        command.here.push((end, tabs));
                    } else {
                        text.next();
                        let _ = text.eat(">") || text.eat("&") || text.eat("|");
                        self.target(text)?;
                    }
                }
                _ => self.part(text, &mut command)?,
            }
        }
        self.finish(&mut command, &mut fails, false);
        Ok(())
    }

    /// Reads the word behind a redirection.
    fn target(&mut self, text: &mut Text<'_>) -> Result<String, String> {
        text.skip(text.rest.len() - text.rest.trim_start_matches([' ', '\t']).len());
        Ok(self.word(text, 0)?.join(" "))
    }

    /// Reads a word or an assignment of a command.
    fn part(&mut self, text: &mut Text<'_>, command: &mut Command) -> Result<(), String> {
        let may_assign = !command.begun || command.declares;
        let assignment = may_assign.then(|| assignment(text.rest)).flatten();
        if let Some((name, appends)) = assignment {
            let name = name.to_owned();
            text.skip(name.len() + usize::from(appends) + 1);
            let (values, is_array) = self.values(text)?;
            let mut all =
                if appends { self.variables.get(&name).cloned().unwrap_or_default() } else { Vec::new() };
            match (all.first_mut(), is_array) {
                (Some(first), false) => first.push_str(&values.concat()),
                _ => all.extend(values),
            }
            self.count_values(&all)?;
            if self.skips() {
                return Ok(());
            }
            if command.declares {
                self.variables.insert(name, all);
            } else {
                command.assigned.push((name, all));
            }
            return Ok(());
        }
        let (line, written) = (text.line, text.rest);
        let words = self.word(text, 0)?;
        let written = written.get(..written.len() - text.rest.len()).unwrap_or_default();
        if !command.begun && self.keyword(written, line)? {
            return Ok(());
        }
        // The number of a stream, as in `2>`, belongs to the redirection.
        if text.rest.starts_with(['<', '>']) && written.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(());
        }
        command.begun = true;
        if command.line.words.is_empty() {
            command.declares = matches!(written, "export" | "declare" | "local" | "readonly" | "typeset");
        }
        command.line.words.extend(words);
        Ok(())
    }

    /// Handles a word that begins or ends a block. Returns false for other words.
    fn keyword(&mut self, word: &str, line: usize) -> Result<bool, String> {
        let end_of = |word: &str| match word {
            "fi" => "if",
            "esac" => "case",
            _ => "for",
        };
        match word {
            "if" | "case" | "for" | "while" | "until" | "select" => {
                let block = if matches!(word, "if" | "case") { word } else { "for" };
                // No branch of a `case` counts, because the value is unknown.
                let skips = self.skips() || word == "case";
                self.open.push(Block { word: block.to_owned(), line, skips });
                // The words of a `for` are a command here, which sets its variable.
                return Ok(word != "for");
            }
            "else" | "elif" => {
                if let Some(block) = self.open.last_mut() {
                    block.skips = true;
                }
            }
            "fi" | "done" | "esac" => match self.open.pop() {
                Some(block) if block.word == end_of(word) => {}
                _ => return Err(format!("line {line}: `{word}` ends nothing")),
            },
            "then" | "do" => {
                if self.open.is_empty() {
                    return Err(format!("line {line}: `{word}` stands alone"));
                }
            }
            "{" | "}" | "!" | "time" | "function" => {}
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn skips(&self) -> bool {
        self.open.last().is_some_and(|block| block.skips)
    }

    /// Ends a command. `or` tells whether `||` ends it.
    fn finish(&mut self, command: &mut Command, fails: &mut bool, or: bool) {
        let Command { mut line, declares, assigned, .. } = std::mem::take(command);
        let counts = !std::mem::replace(fails, or) && !self.skips();
        if !counts || declares {
            return;
        }
        if line.words.is_empty() {
            self.variables.extend(assigned);
            return;
        }
        if let ["for", name, "in", first, ..] = &line.words.iter().map(String::as_str).collect::<Vec<_>>()[..]
        {
            self.variables.insert((*name).to_owned(), vec![(*first).to_owned()]);
            return;
        }
        for &name in self.kept {
            let own = assigned.iter().find(|(own, _)| own == name).map(|(_, values)| values);
            let values = own.or_else(|| self.variables.get(name));
            // Every command has a copy. The values are numbers; a longer text is none.
            let is_short = |values: &&Vec<String>| values.iter().map(String::len).sum::<usize>() <= 256;
            if let Some(values) = values.filter(is_short).filter(|values| values.len() <= 256) {
                line.environment.insert(name.to_owned(), values.join(" "));
            }
        }
        self.lines.push(line);
    }

    /// Reads what is assigned, and whether it is an array.
    fn values(&mut self, text: &mut Text<'_>) -> Result<(Values, bool), String> {
        if !text.eat("(") {
            let mut words = Words::default();
            self.read(text, &mut words, Ends::AssignedWord, 0)?;
            return Ok((vec![words.end().join(" ")], false));
        }
        let line = text.line;
        let mut values = Vec::new();
        loop {
            match text.peek() {
                None => return Err(format!("line {line}: `(` has no `)`")),
                Some(')') => {
                    text.next();
                    break;
                }
                Some('#') => drop(text.skip(text.rest.find('\n').unwrap_or(text.rest.len()))),
                Some(c) if c.is_whitespace() => drop(text.next()),
                Some(c @ (';' | '&' | '|' | '(' | '<' | '>')) => {
                    return Err(format!("line {}: `{c}` in an array", text.line));
                }
                Some(_) => values.extend(self.word(text, 0)?),
            }
        }
        Ok((values, true))
    }

    /// Reads a word, and returns the words that it becomes.
    fn word(&mut self, text: &mut Text<'_>, depth: usize) -> Result<Vec<String>, String> {
        let mut words = Words::default();
        self.read(text, &mut words, Ends::Word, depth)?;
        Ok(words.end())
    }

    fn count(&mut self, bytes: usize) -> Result<(), String> {
        self.expanded += bytes;
        match self.expanded > MAX_EXPANDED {
            true => {
                Err(format!("its words have more than {MAX_EXPANDED} bytes after variables are filled in"))
            }
            false => Ok(()),
        }
    }

    fn count_values(&mut self, values: &[String]) -> Result<(), String> {
        self.count(values.iter().map(|value| value.len() + 1).sum())
    }

    // One `match` over the next character: parts of it would have to say what they did to the loop.
    fn read(
        &mut self,
        text: &mut Text<'_>,
        words: &mut Words,
        ends: Ends,
        depth: usize,
    ) -> Result<(), String> {
        if depth > MAX_DEPTH {
            return Err(format!("line {}: more than {MAX_DEPTH} defaults in defaults", text.line));
        }
        let quoted = ends == Ends::Quote;
        let begun = text.line;
        let mut is_start = true;
        while let Some(c) = text.peek() {
            let was_start = std::mem::replace(&mut is_start, false);
            let before = text.rest;
            match c {
                '"' if quoted => {
                    text.next();
                    return Ok(());
                }
                '\\' => {
                    text.next();
                    match text.next() {
                        Some('\n') | None => {}
                        Some(c) if quoted && !"$`\"\\".contains(c) => words.push(&format!("\\{c}")),
                        Some(c) => words.push(c.encode_utf8(&mut [0; 4])),
                    }
                }
                '$' => self.dollar(text, words, ends, depth)?,
                '`' => {
                    text.next();
                    text.until('`', "a command in backquotes")?;
                    words.push(&before[..before.len() - text.rest.len()]);
                }
                c if quoted => {
                    text.next();
                    words.push(c.encode_utf8(&mut [0; 4]));
                }
                '\'' => {
                    text.next();
                    words.push(text.until('\'', "text in quotes")?);
                }
                '"' => {
                    text.next();
                    // An empty text in quotes is a word; an array without elements is none.
                    if text.peek() == Some('"') {
                        words.push("");
                    }
                    self.read(text, words, Ends::Quote, depth)?;
                }
                '<' | '>' if was_start && ends == Ends::Word => {
                    text.skip(2);
                    text.balanced('(', ')')?;
                    words.push(&before[..before.len() - text.rest.len()]);
                }
                c if matches!(ends, Ends::Word | Ends::AssignedWord)
                    && (c.is_whitespace() || ";&|()<>".contains(c)) =>
                {
                    return Ok(());
                }
                c if c.is_whitespace() && ends == Ends::Text => {
                    text.next();
                    words.split(" ");
                }
                '~' if was_start
                    && matches!(text.rest.as_bytes().get(1), None | Some(b'/' | b' ' | b'\n')) =>
                {
                    text.next();
                    let home = self.scalar("HOME").unwrap_or_default();
                    words.push(&home);
                }
                c => {
                    text.next();
                    words.push(c.encode_utf8(&mut [0; 4]));
                }
            }
            self.count(1)?;
        }
        if quoted { Err(format!("line {begun}: text in quotes has no end")) } else { Ok(()) }
    }

    /// Reads what begins with `$`.
    fn dollar(
        &mut self,
        text: &mut Text<'_>,
        words: &mut Words,
        ends: Ends,
        depth: usize,
    ) -> Result<(), String> {
        let before = text.rest;
        text.next();
        let values = match text.peek() {
            Some('(') => {
                text.next();
                text.balanced('(', ')')?;
                None
            }
            Some('{') => {
                text.next();
                let inner = text.balanced('{', '}')?;
                self.parameter(inner, ends == Ends::Quote, depth)?
            }
            Some('\'') if ends != Ends::Quote => {
                text.next();
                Some(vec![text.until('\'', "text in quotes")?.to_owned()])
            }
            // A script that is read has no arguments.
            Some('@' | '*') => {
                text.next();
                Some(Vec::new())
            }
            Some(c) if c.is_ascii_digit() || "?#$!-".contains(c) => {
                text.next();
                None
            }
            _ => {
                let name = text.skip(name_len(text.rest));
                self.scalar(name).map(|value| vec![value])
            }
        };
        let Some(values) = values else {
            words.push(&before[..before.len() - text.rest.len()]);
            return Ok(());
        };
        self.count_values(&values)?;
        match ends {
            Ends::Quote => words.elements(&values),
            Ends::AssignedWord | Ends::AssignedText => words.push(&values.join(" ")),
            Ends::Word | Ends::Text => words.split(&values.join(" ")),
        }
        Ok(())
    }

    /// Returns the values of a parameter in braces; `None` if the script does not set it.
    fn parameter(&mut self, inner: &str, quoted: bool, depth: usize) -> Result<Option<Values>, String> {
        let len = match inner.as_bytes().first() {
            Some(c) if c.is_ascii_digit() || b"@*".contains(c) => 1,
            _ => name_len(inner),
        };
        let (name, rest) = inner.split_at(len);
        if let "[@]" | "[*]" = rest {
            return Ok(self.variables.get(name).cloned());
        }
        let set = match name {
            "@" | "*" => Some(Vec::new()),
            _ => self.scalar(name).map(|value| vec![value]),
        };
        if rest.is_empty() || rest.starts_with(":?") || rest.starts_with('?') {
            return Ok(set);
        }
        let default = [":-", ":=", "-", "="].iter().find_map(|operator| rest.strip_prefix(operator));
        let Some(default) = default.filter(|_| !name.is_empty()) else { return Ok(None) };
        if let Some(set) = set.filter(|values| !rest.starts_with(':') || values.iter().any(|v| !v.is_empty()))
        {
            return Ok(Some(set));
        }
        let mut words = Words::default();
        let ends = if quoted { Ends::AssignedText } else { Ends::Text };
        self.read(&mut Text { rest: default, line: 1 }, &mut words, ends, depth + 1)?;
        Ok(Some(words.end()))
    }

    /// Returns the value of a variable, or the first element of an array.
    fn scalar(&self, name: &str) -> Option<String> {
        self.variables.get(name).map(|values| values.first().cloned().unwrap_or_default())
    }
}

/// End of a text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    /// The end of a word, in which values are split at spaces.
    Word,
    /// The end of a word that is assigned, in which they are not.
    AssignedWord,
    /// A double quote.
    Quote,
    /// The end of the text, in which spaces separate words.
    Text,
    /// The end of the text, in which they do not.
    AssignedText,
}

/// Returns the length of the name that a text begins with.
fn name_len(text: &str) -> usize {
    let is_part =
        |(at, c): &(usize, char)| *c == '_' || c.is_ascii_alphabetic() || *at > 0 && c.is_ascii_digit();
    text.char_indices().take_while(is_part).count()
}

/// Returns the name of an assignment that the text begins with, and whether it appends.
fn assignment(text: &str) -> Option<(&str, bool)> {
    let (name, rest) = text.split_at(name_len(text));
    let appends = rest.starts_with("+=");
    (!name.is_empty() && (appends || rest.starts_with('='))).then_some((name, appends))
}

/// Moves behind the text that `<<END` begins.
fn skip_here(text: &mut Text<'_>, end: &str, tabs: bool) -> Result<(), String> {
    let begun = text.line;
    while !text.rest.is_empty() {
        let line =
            text.skip(text.rest.find('\n').map_or(text.rest.len(), |at| at + 1)).trim_end_matches('\n');
        if end == if tabs { line.trim_start_matches('\t') } else { line } {
            return Ok(());
        }
    }
    Err(format!("line {begun}: the text up to `{end}` has no end"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<Vec<String>> {
        commands(text, "/srv/me", &[]).unwrap().into_iter().map(|line| line.words).collect()
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
        let script = r#"
            DATA=(
                data.a=1   # one
                "data.b=x y"
            )
            if [ -n "$DEBUG" ]; then FLAGS=(--debug true); else FLAGS=(); fi
            case "$1" in
                a) FLAGS=(--case);;
                *) exit 1;;
            esac
            for SIZE in 3B 7B; do echo "$SIZE"; done
            false || FLAGS=(--failed)
            run() { python3 -m verl.trainer.main_ppo "${DATA[@]}" ${FLAGS[@]} $SIZE; }
        "#;
        let lines = words(script);
        assert_eq!(lines.len(), 4, "{lines:?}");
        assert_eq!(lines[1], owned(["echo", "3B"]));
        assert_eq!(lines[3][3..], owned(["data.a=1", "data.b=x y", "--debug", "true", "3B"]));
    }

    #[test]
    fn what_is_unknown_stays_as_it_is_written() {
        let text = "run --name $(date +'%s)')-$UNSET --dir \"${OUT}/x\" $((1 + 1)) `a b` ${X%.*} <(a b)";
        let expected = [
            "run",
            "--name",
            "$(date +'%s)')-$UNSET",
            "--dir",
            "${OUT}/x",
            "$((1 + 1))",
            "`a b`",
            "${X%.*}",
            "<(a b)",
        ];
        assert_eq!(words(text), [owned(expected)]);
    }

    #[test]
    fn texts_for_a_command_are_no_commands() {
        let text =
            "cat <<EOF > config.yaml\ntrl grpo --beta 1\nEOF\ncat <<-'E'\n\ta $(\n\tE\necho <<<text done";
        assert_eq!(words(text), [owned(["cat"]), owned(["cat"]), owned(["echo", "done"])]);
    }

    #[test]
    fn variables_of_a_command_are_kept() {
        let text = "export A=1\nNPROC_PER_NODE=8 B=2 \\\nswift rlhf --model x";
        let lines = commands(text, "", &["NPROC_PER_NODE", "A"]).unwrap();
        assert_eq!(lines[0].words, ["swift", "rlhf", "--model", "x"]);
        let expected =
            [("NPROC_PER_NODE", "8"), ("A", "1")].map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(lines[0].environment, HashMap::from(expected));
    }

    #[test]
    fn text_that_is_no_script_is_refused() {
        let doubled = "a=xxxxxxxxxxxxxxxx\n".to_owned() + &"a=$a$a\n".repeat(64);
        let elements = format!("a=({})\n{}", "'' ".repeat(4000), "run \"${a[@]}\"\n".repeat(4000));
        let nested = format!("run {}x{}", "${A:-".repeat(100), "}".repeat(100));
        for (text, reason) in [
            ("if then (", "line 1: `if` has no end"),
            ("\nfi", "line 2: `fi` ends nothing"),
            ("then x", "line 1: `then` stands alone"),
            ("run 'a", "line 1: text in quotes has no end"),
            ("run \"a", "line 1: text in quotes has no end"),
            ("run $(a", "line 1: `(` has no `)`"),
            ("A=(a", "line 1: `(` has no `)`"),
            ("A=(a; b)", "line 1: `;` in an array"),
            ("cat <<E\n", "line 2: the text up to `E` has no end"),
            (&doubled, "its words have more than 4194304 bytes after variables are filled in"),
            (&elements, "its words have more than 4194304 bytes after variables are filled in"),
            (&nested, "line 1: more than 16 defaults in defaults"),
        ] {
            assert_eq!(commands(text, "", &[]).unwrap_err(), reason);
        }
        let deep = ["$(", "((", "\"$(", "${", "`", "<("].map(|part| part.repeat(20_001));
        for text in deep {
            assert!(commands(&text, "", &[]).is_err());
        }
        assert_eq!(words(&"( ".repeat(20_000)), Vec::<Vec<String>>::new());
    }
}
