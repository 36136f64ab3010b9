//! Launch scripts of shells: the words of each command, with the variables, arrays and functions of the script filled in.
//!
//! `brush_parser` reads the script, and nothing is run. Variables that the script does not set are unset, except `HOME`, and the
//! script has no arguments. A condition that follows from the script is evaluated. For another one, such as a look for a file,
//! the first branch counts, and a note names it. A loop is read once. The output of a command and a variable without a value stay
//! in the text as they are written.

mod tests_of;
mod words;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use brush_parser::ast::{
    AndOr, AndOrList, Assignment, AssignmentName, AssignmentValue, CaseClauseCommand, Command,
    CommandPrefixOrSuffixItem as Item, CompoundCommand, CompoundList, FunctionBody, IfClauseCommand,
    IoFileRedirectKind, IoFileRedirectTarget, IoRedirect, Pipeline, Program, SimpleCommand,
};
use brush_parser::{ParseError, Parser, ParserOptions};

use words::{closed, plain};

/// Maximum number of bytes of a script.
const MAX_TEXT: usize = 1 << 20;
/// Maximum number of bytes of all words and values together. Variables can repeat each other, so a short script can have long words.
const MAX_EXPANDED: usize = 1 << 22;
/// Maximum number of commands. A short script can call its functions many times.
const MAX_COMMANDS: usize = 1 << 17;
/// Maximum number of brackets that are open at once outside and inside of quotes. The time of the parser doubles with each one.
const MAX_BRACKETS: usize = 8;
/// Maximum number of open brackets, whatever is in quotes.
const MAX_MARKS: usize = 256;
/// Maximum depth of calls of functions, texts for `eval` and values in values.
const MAX_DEPTH: usize = 16;
/// Stack of the thread that reads a script, bytes. A long list of conditions is a deep tree.
const STACK: usize = 1 << 28;
/// Time after which a script is given up. Scripts of projects take milliseconds.
const PATIENCE: Duration = Duration::from_secs(20);

/// A command of a script.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Line {
    /// Variables of [`read`] that are set for the command or before it.
    pub environment: HashMap<String, String>,
    /// Words after expansion.
    pub words: Vec<String>,
}

/// The commands of a script.
#[derive(Debug, Default)]
pub struct Script {
    /// Commands in their order.
    pub lines: Vec<Line>,
    /// One sentence about each condition that could not be decided.
    pub notes: Vec<String>,
}

/// Reads a script at a path, with each command's values of the variables `kept`.
///
/// # Errors
/// Returns the reason why the text is no script.
pub fn read(text: &str, path: &Path, home: &str, kept: &'static [&'static str]) -> Result<Script, String> {
    if text.len() > MAX_TEXT {
        return Err(format!("it has more than {MAX_TEXT} bytes"));
    }
    let (text, home) = (text.to_owned(), home.to_owned());
    let own = std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).display().to_string();
    let (send, receive) = mpsc::channel();
    let run = move || {
        let script = omnigrpo_guard::guarded(|| Shell::new(own, home, kept).script(&text));
        // Nobody listens once the time is over.
        drop(send.send(script));
    };
    let thread =
        std::thread::Builder::new().stack_size(STACK).spawn(run).map_err(|error| error.to_string())?;
    match receive.recv_timeout(PATIENCE) {
        Ok(Ok(script)) => {
            drop(thread.join());
            script
        }
        Ok(Err(_)) => Err("its words are too unusual to read".to_owned()),
        Err(_) => Err(format!("it could not be read in {} s", PATIENCE.as_secs())),
    }
}

/// Returns an error if too many brackets are open at once.
fn check_brackets(text: &str) -> Result<(), String> {
    let (mut line, mut marks) = (1, 0_usize);
    // The open brackets and double quotes.
    let mut open: Vec<char> = Vec::new();
    let mut brackets = 0_usize;
    let mut here: Vec<(String, bool)> = Vec::new();
    let mut chars = text.char_indices().peekable();
    let mut before = '\n';
    while let Some((at, c)) = chars.next() {
        let quoted = open.last() == Some(&'"');
        let word_begins = before.is_whitespace() || "();&|".contains(before);
        before = c;
        match c {
            '(' | '{' => marks += 1,
            ')' | '}' => marks = marks.saturating_sub(1),
            _ => {}
        }
        match c {
            '\n' => {
                line += 1;
                // The lines up to the end of a text for a command are no commands.
                let mut rest = &text[at + 1..];
                for (end, tabs) in here.drain(..) {
                    while let Some(one) = rest.split_inclusive('\n').next() {
                        line += 1;
                        rest = &rest[one.len()..];
                        let one = one.trim_end_matches('\n');
                        if end == if tabs { one.trim_start_matches('\t') } else { one } {
                            break;
                        }
                    }
                }
                let read = text.len() - rest.len();
                while chars.next_if(|&(next, _)| next < read).is_some() {}
            }
            '\\' => before = chars.next().map_or(c, |(_, c)| if c == '\n' { ' ' } else { c }),
            '\'' if !quoted => {
                while let Some((_, c)) = chars.next_if(|&(_, c)| c != '\'') {
                    line += usize::from(c == '\n');
                }
                chars.next();
            }
            '#' if !quoted && word_begins => while chars.next_if(|&(_, c)| c != '\n').is_some() {},
            '"' if quoted => drop(open.pop()),
            '"' => open.push('"'),
            '<' if !quoted && text[at..].starts_with("<<") && !text[at..].starts_with("<<<") => {
                let rest = text[at + 2..].split_whitespace().next().unwrap_or_default();
                let tabs = rest.starts_with('-');
                let end = rest.trim_start_matches('-').trim_matches(['\'', '"', '\\']);
                if !end.is_empty() && !text[..at].ends_with('<') {
                    here.push((end.to_owned(), tabs));
                }
            }
            // In double quotes, only `$(` and `${` open.
            '(' | '{' if !quoted || text[..at].ends_with(['$', '(']) => {
                open.push(c);
                brackets += 1;
            }
            ')' | '}' => {
                let own = if c == ')' { '(' } else { '{' };
                if open.last() == Some(&own) {
                    open.pop();
                    brackets -= 1;
                }
            }
            _ => {}
        }
        if brackets > MAX_BRACKETS || marks > MAX_MARKS {
            return Err(format!("line {line}: more than {MAX_BRACKETS} brackets in brackets"));
        }
    }
    Ok(())
}

/// Result of a command, as a condition sees it.
#[derive(Clone, Debug)]
enum Status {
    Yes,
    No,
    /// A program ran, which is taken for success.
    Ran,
    /// A test that depends on the machine.
    Unknown,
}

impl From<Option<bool>> for Status {
    fn from(known: Option<bool>) -> Self {
        match known {
            Some(true) => Self::Yes,
            Some(false) => Self::No,
            None => Self::Unknown,
        }
    }
}

type Done = Result<Status, String>;

struct Shell {
    /// Values of variables; an array has any number of them.
    variables: HashMap<String, Vec<String>>,
    functions: Vec<(String, Rc<FunctionBody>)>,
    called: HashSet<String>,
    /// Arguments of the function that is read.
    arguments: Vec<String>,
    kept: &'static [&'static str],
    options: ParserOptions,
    script: Script,
    expanded: usize,
    commands: usize,
    depth: usize,
    /// True while a condition is read, in which a variable without a value is empty.
    tests: bool,
}

impl Shell {
    fn new(path: String, home: String, kept: &'static [&'static str]) -> Self {
        let own = [("HOME", home), ("BASH_SOURCE", path)];
        Self {
            variables: own.map(|(name, value)| (name.to_owned(), vec![value])).into(),
            functions: Vec::new(),
            called: HashSet::new(),
            arguments: Vec::new(),
            kept,
            options: ParserOptions::default(),
            script: Script::default(),
            expanded: 0,
            commands: 0,
            depth: 0,
            tests: false,
        }
    }

    fn script(mut self, text: &str) -> Result<Script, String> {
        self.text(text)?;
        // A function that nothing calls may be called from the terminal.
        for (name, body) in self.functions.clone() {
            if self.called.insert(name) {
                self.compound(&body.0)?;
            }
        }
        Ok(self.script)
    }

    fn note(&mut self, note: String) {
        if !self.script.notes.contains(&note) && self.script.notes.len() < 64 {
            self.script.notes.push(note);
        }
    }

    /// Reads the commands of a text.
    fn text(&mut self, text: &str) -> Done {
        let program = self.parse(text)?;
        let mut status = Status::Yes;
        for list in &program.complete_commands {
            status = self.list(list)?;
        }
        Ok(status)
    }

    fn parse(&self, text: &str) -> Result<Program, String> {
        if text.contains([words::SPACE, words::MARK]) {
            return Err("it has characters for private use".to_owned());
        }
        check_brackets(text)?;
        let parsed = Parser::new(text.as_bytes(), &self.options).parse_program();
        parsed.map_err(|error| match error {
            ParseError::ParsingNear(at) => {
                format!("line {}: the command is incomplete or out of place", at.line)
            }
            ParseError::ParsingAtEndOfInput => "its last command is incomplete or out of place".to_owned(),
            ParseError::Tokenizing { inner, position: Some(at) } => format!("line {}: {inner}", at.line),
            ParseError::Tokenizing { inner, position: None } => inner.to_string(),
        })
    }

    /// Goes one level down, into a function or a text, for the time of `run`.
    fn nested<T>(&mut self, run: impl FnOnce(&mut Self) -> Result<T, String>) -> Result<T, String> {
        if self.depth >= MAX_DEPTH {
            return Err(format!("more than {MAX_DEPTH} calls, texts or values in one another"));
        }
        self.depth += 1;
        let result = run(self);
        self.depth -= 1;
        result
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

    fn list(&mut self, list: &CompoundList) -> Done {
        let mut status = Status::Yes;
        for item in &list.0 {
            status = self.and_or(&item.0)?;
        }
        Ok(status)
    }

    fn and_or(&mut self, list: &AndOrList) -> Done {
        let mut status = self.pipeline(&list.first)?;
        for next in &list.additional {
            let (pipeline, runs) = match (next, &status) {
                (AndOr::And(pipeline), Status::Unknown) | (AndOr::Or(pipeline), Status::Unknown) => {
                    let runs = matches!(next, AndOr::And(_));
                    if pipeline.seq.iter().any(matters) {
                        self.undecided(
                            pipeline_line(pipeline),
                            &list.first.to_string(),
                            match runs {
                                true => "what it guards counts",
                                false => "what follows its failure does not count",
                            },
                        );
                    }
                    (pipeline, runs)
                }
                (AndOr::And(pipeline), status) => (pipeline, !matches!(status, Status::No)),
                (AndOr::Or(pipeline), status) => (pipeline, matches!(status, Status::No)),
            };
            if runs {
                status = self.pipeline(pipeline)?;
            }
        }
        Ok(status)
    }

    fn pipeline(&mut self, pipeline: &Pipeline) -> Done {
        let mut status = Status::Yes;
        for command in &pipeline.seq {
            status = self.command(command)?;
        }
        Ok(match (pipeline.bang, status) {
            (true, Status::Yes) => Status::No,
            (true, Status::No) => Status::Yes,
            (true, Status::Ran) => Status::Unknown,
            (_, status) => status,
        })
    }

    fn command(&mut self, command: &Command) -> Done {
        self.commands += 1;
        if self.commands > MAX_COMMANDS {
            return Err(format!(
                "it has more than {MAX_COMMANDS} commands after its functions are filled in"
            ));
        }
        match command {
            Command::Simple(simple) => self.simple(simple),
            Command::Compound(compound, _) => self.compound(compound),
            Command::Function(function) => {
                let name = function.fname.value.clone();
                self.functions.retain(|(known, _)| *known != name);
                self.functions.push((name, Rc::new(function.body.clone())));
                Ok(Status::Yes)
            }
            Command::ExtendedTest(test, _) => Ok(self.extended_test(&test.expr)?.into()),
        }
    }

    fn compound(&mut self, compound: &CompoundCommand) -> Done {
        match compound {
            CompoundCommand::BraceGroup(group) => self.list(&group.list),
            CompoundCommand::Subshell(group) => self.list(&group.list),
            CompoundCommand::IfClause(clause) => self.if_clause(clause),
            CompoundCommand::CaseClause(clause) => self.case_clause(clause),
            CompoundCommand::ForClause(clause) => {
                let mut values = Vec::new();
                for word in clause.values.iter().flatten() {
                    values.extend(self.words(&word.value)?);
                }
                let Some(first) = values.first().cloned() else { return Ok(Status::Yes) };
                if values.len() > 1 && has_launch(&clause.body.list) {
                    let first = plain(&first);
                    self.note(format!(
                        "Line {}: the loop runs {} times; only the run with {first} is translated.",
                        clause.loc.start.line,
                        values.len(),
                    ));
                }
                self.set(&clause.variable_name, vec![first])?;
                self.list(&clause.body.list)
            }
            CompoundCommand::WhileClause(clause) => match self.list(&clause.0)? {
                Status::No => Ok(Status::Yes),
                _ => self.list(&clause.1.list),
            },
            CompoundCommand::UntilClause(clause) => match self.list(&clause.0)? {
                Status::Yes => Ok(Status::Yes),
                _ => self.list(&clause.1.list),
            },
            CompoundCommand::ArithmeticForClause(clause) => self.list(&clause.body.list),
            CompoundCommand::Arithmetic(command) => {
                Ok(self.number(&command.expr.value)?.map(|number| number != 0).into())
            }
            CompoundCommand::Coprocess(process) => self.command(&process.body),
        }
    }

    fn if_clause(&mut self, clause: &IfClauseCommand) -> Done {
        let elses = clause.elses.as_deref().unwrap_or_default();
        let branches = std::iter::once((Some(&clause.condition), &clause.then))
            .chain(elses.iter().map(|branch| (branch.condition.as_ref(), &branch.body)));
        for (condition, body) in branches {
            let status = condition.map_or(Ok(Status::Yes), |condition| self.list(condition))?;
            match (status, condition) {
                (Status::No, _) => {}
                (Status::Unknown | Status::Ran, Some(condition)) => {
                    let bodies = std::iter::once(&clause.then).chain(elses.iter().map(|branch| &branch.body));
                    if bodies.into_iter().any(list_matters) {
                        self.undecided(clause.loc.start.line, &condition.to_string(), "its branch counts");
                    }
                    return self.list(body);
                }
                _ => return self.list(body),
            }
        }
        Ok(Status::Yes)
    }

    fn case_clause(&mut self, clause: &CaseClauseCommand) -> Done {
        let value = self.tested(&clause.value.value)?;
        let Some(value) = value else {
            if clause.cases.iter().filter_map(|case| case.cmd.as_ref()).any(list_matters) {
                self.undecided(clause.loc.start.line, &clause.value.value, "none of its branches counts");
            }
            return Ok(Status::Yes);
        };
        for case in &clause.cases {
            for pattern in &case.patterns {
                let pattern = self.assigned(&pattern.value)?;
                if self.fits(&pattern, &value) == Some(true) {
                    return case.cmd.as_ref().map_or(Ok(Status::Yes), |body| self.list(body));
                }
            }
        }
        Ok(Status::Yes)
    }

    /// Names a condition that depends on the machine.
    fn undecided(&mut self, line: usize, condition: &str, counts: &str) {
        const MOST: usize = 80;
        let mut shown: String = condition.split_whitespace().collect::<Vec<_>>().join(" ");
        // A long word may be a password.
        if shown.chars().count() > MOST || shown.split(' ').any(|word| word.len() > 30) {
            shown = "its condition".to_owned();
        } else {
            shown = format!("`{shown}`");
        }
        self.note(format!("Line {line}: {shown} cannot be decided here; {counts}."));
    }

    /// Sets a variable.
    fn set(&mut self, name: &str, values: Vec<String>) -> Result<(), String> {
        self.count(values.iter().map(|value| value.len() + 1).sum())?;
        self.variables.insert(name.to_owned(), values);
        Ok(())
    }

    /// Returns the name and the values that an assignment gives.
    fn values(&mut self, assignment: &Assignment) -> Result<(String, Vec<String>), String> {
        let (name, index) = match &assignment.name {
            AssignmentName::VariableName(name) => (name, None),
            AssignmentName::ArrayElementName(name, index) => (name, Some(index)),
        };
        let mut all = match assignment.append || index.is_some() {
            true => self.variables.get(name).cloned().unwrap_or_default(),
            false => Vec::new(),
        };
        match &assignment.value {
            AssignmentValue::Scalar(word) => {
                let value = self.assigned(&word.value)?;
                let at = match index {
                    None => 0,
                    // The keys of a map are not kept.
                    Some(index) => index.parse().unwrap_or(all.len()).min(all.len()),
                };
                match all.get_mut(at) {
                    Some(old) if assignment.append => old.push_str(&value),
                    Some(old) => *old = value,
                    None => all.push(value),
                }
            }
            AssignmentValue::Array(elements) => {
                for (_, word) in elements {
                    all.extend(self.words(&word.value)?);
                }
            }
        }
        Ok((name.clone(), all))
    }

    fn simple(&mut self, simple: &SimpleCommand) -> Done {
        let prefix = simple.prefix.iter().flat_map(|prefix| &prefix.0);
        let mut assigned = Vec::new();
        for item in prefix {
            if let Item::AssignmentWord(assignment, _) = item {
                let values = self.values(assignment)?;
                // Later assignments of the command may use the earlier ones.
                match simple.word_or_name {
                    None => self.set(&values.0, values.1)?,
                    Some(_) => assigned.push(values),
                }
            }
        }
        let Some(name) = &simple.word_or_name else { return Ok(Status::Yes) };
        let suffix = simple.suffix.iter().flat_map(|suffix| &suffix.0);
        if matches!(name.value.as_str(), "export" | "declare" | "local" | "readonly" | "typeset") {
            for item in suffix {
                if let Item::AssignmentWord(assignment, _) = item {
                    let (name, values) = self.values(assignment)?;
                    self.set(&name, values)?;
                }
            }
            return Ok(Status::Yes);
        }
        self.tests = matches!(name.value.as_str(), "[" | "test");
        let words = self.command_words(simple);
        let tests = std::mem::take(&mut self.tests);
        let words = words?;
        self.count(words.iter().map(|word| word.len() + 1).sum())?;
        if tests {
            return Ok(self.test(&words)?.into());
        }
        let plain_words: Vec<&str> = words.iter().map(String::as_str).collect();
        match plain_words[..] {
            [] | [":" | "true", ..] => Ok(Status::Yes),
            ["false", ..] => Ok(Status::No),
            ["unset", ref names @ ..] => {
                names.iter().for_each(|name| drop(self.variables.remove(*name)));
                Ok(Status::Yes)
            }
            ["eval", ref words @ ..] => {
                let text = plain(&words.join(" "));
                self.nested(|shell| shell.text(&text))
            }
            ["cd", folder] => {
                let folder = plain(folder);
                self.note(format!(
                    "The script changes to the folder {folder}; relative paths in it belong to that folder."
                ));
                Ok(Status::Ran)
            }
            [name, ref arguments @ ..] if self.functions.iter().any(|(known, _)| known == name) => {
                let body =
                    self.functions.iter().find(|(known, _)| known == name).map(|(_, body)| Rc::clone(body));
                self.called.insert(name.to_owned());
                let own = arguments.iter().map(|&word| word.to_owned()).collect();
                let outer = std::mem::replace(&mut self.arguments, own);
                let done = self.nested(|shell| body.map_or(Ok(Status::Ran), |body| shell.compound(&body.0)));
                self.arguments = outer;
                done
            }
            _ => {
                // `bash -c TEXT`, `srun bash -c TEXT`.
                let shell = plain_words.windows(3).find(|words| {
                    matches!(words[0].rsplit('/').next(), Some("bash" | "sh" | "zsh"))
                        && matches!(words[1], "-c" | "-lc" | "-ec" | "-xc")
                });
                if let Some(&[_, _, text]) = shell {
                    let text = plain(text);
                    return self.nested(|shell| shell.text(&text));
                }
                let environment = self.environment(&assigned);
                let words = words.iter().map(|word| plain(word)).collect();
                self.script.lines.push(Line { environment, words });
                Ok(Status::Ran)
            }
        }
    }

    /// Returns the words of a command after expansion.
    fn command_words(&mut self, simple: &SimpleCommand) -> Result<Vec<String>, String> {
        let mut words = Vec::new();
        if let Some(name) = &simple.word_or_name {
            words.extend(self.words(&name.value)?);
        }
        let items: Vec<&Item> = simple.suffix.iter().flat_map(|suffix| &suffix.0).collect();
        for (at, item) in items.iter().enumerate() {
            match item {
                Item::Word(word) | Item::AssignmentWord(_, word) => words.extend(self.words(&word.value)?),
                Item::ProcessSubstitution(kind, inner) => words.push(closed(&format!("{kind}{inner}"))),
                // `<PATH>`, which a project writes for a value of the user, redirects from PATH and to the next word.
                Item::IoRedirect(IoRedirect::File(
                    None,
                    IoFileRedirectKind::Read,
                    IoFileRedirectTarget::Filename(name),
                )) => {
                    if let Some(Item::IoRedirect(IoRedirect::File(
                        None,
                        IoFileRedirectKind::Write,
                        IoFileRedirectTarget::Filename(next),
                    ))) = items.get(at + 1)
                    {
                        words.push(closed(&format!("<{}>", name.value)));
                        words.extend(self.words(&next.value)?);
                    }
                }
                Item::IoRedirect(_) => {}
            }
        }
        Ok(words)
    }

    /// Returns the variables that are kept for a command.
    fn environment(&self, assigned: &[(String, Vec<String>)]) -> HashMap<String, String> {
        let value = |name: &&'static str| {
            let own = assigned.iter().rev().find(|(own, _)| own == name).map(|(_, values)| values);
            let values = own.or_else(|| self.variables.get(*name))?;
            // Every command has a copy. The values are numbers; a longer text is none.
            let is_short = values.len() <= 256 && values.iter().map(String::len).sum::<usize>() <= 256;
            is_short.then(|| ((*name).to_owned(), plain(&values.join(" "))))
        };
        self.kept.iter().filter_map(value).collect()
    }
}

/// Returns the line of a pipeline, or 1 if the parser does not know it.
fn pipeline_line(pipeline: &Pipeline) -> usize {
    use brush_parser::ast::SourceLocation;
    pipeline.seq.first().and_then(|command| command.location()).map_or(1, |at| at.start.line)
}

/// Returns true if a command sets a variable or may start a training.
fn matters(command: &Command) -> bool {
    match command {
        Command::Simple(simple) => {
            let sets = simple.word_or_name.is_none() && simple.prefix.is_some();
            let declares = simple.word_or_name.as_ref().is_some_and(|name| {
                matches!(
                    name.value.as_str(),
                    "export" | "declare" | "local" | "readonly" | "typeset" | "eval"
                )
            });
            sets || declares || launches(simple)
        }
        Command::Compound(compound, _) => bodies(compound).into_iter().any(list_matters),
        Command::Function(_) | Command::ExtendedTest(..) => false,
    }
}

fn list_matters(list: &CompoundList) -> bool {
    commands(list).any(matters)
}

/// Returns true if a list may start a training.
fn has_launch(list: &CompoundList) -> bool {
    commands(list).any(|command| match command {
        Command::Simple(simple) => launches(simple),
        Command::Compound(compound, _) => bodies(compound).into_iter().any(has_launch),
        _ => false,
    })
}

/// Returns true if a command may start a training: it has many words.
fn launches(simple: &SimpleCommand) -> bool {
    simple.suffix.as_ref().is_some_and(|suffix| suffix.0.len() > 4)
}

fn commands(list: &CompoundList) -> impl Iterator<Item = &Command> {
    let pipelines = list.0.iter().flat_map(|item| {
        let additional = item.0.additional.iter().map(|next| match next {
            AndOr::And(pipeline) | AndOr::Or(pipeline) => pipeline,
        });
        std::iter::once(&item.0.first).chain(additional)
    });
    pipelines.flat_map(|pipeline| &pipeline.seq)
}

/// Returns the lists in a compound command, but those of its conditions.
fn bodies(compound: &CompoundCommand) -> Vec<&CompoundList> {
    match compound {
        CompoundCommand::BraceGroup(group) => vec![&group.list],
        CompoundCommand::Subshell(group) => vec![&group.list],
        CompoundCommand::ForClause(clause) => vec![&clause.body.list],
        CompoundCommand::ArithmeticForClause(clause) => vec![&clause.body.list],
        CompoundCommand::WhileClause(clause) | CompoundCommand::UntilClause(clause) => vec![&clause.1.list],
        CompoundCommand::CaseClause(clause) => {
            clause.cases.iter().filter_map(|case| case.cmd.as_ref()).collect()
        }
        CompoundCommand::IfClause(clause) => {
            let elses = clause.elses.iter().flatten().map(|branch| &branch.body);
            std::iter::once(&clause.then).chain(elses).collect()
        }
        CompoundCommand::Arithmetic(_) | CompoundCommand::Coprocess(_) => Vec::new(),
    }
}

#[cfg(test)]
mod tests;
