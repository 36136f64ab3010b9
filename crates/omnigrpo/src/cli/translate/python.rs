//! Training scripts in Python: the arguments of the calls that configure a run. The script is read and never run.
//!
//! A value must be a literal, a name to which the script assigns one, or a list of them. Functions that the script defines are
//! known by name. Everything else stays in the text as it is written.

use std::collections::{HashMap, HashSet};

/// Names of the functions and classes whose arguments are read.
const CALLS: [&str; 7] = [
    "BitsAndBytesConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "LoraConfig",
    "from_pretrained",
    "get_peft_model",
    "load_dataset",
];

/// Maximum number of bytes of a value with a name. A script can repeat the name.
const MAX_VALUE: usize = 1024;

/// Call that configures a run.
#[derive(Debug, PartialEq, Eq)]
pub struct Call<'t> {
    /// Name of the function or class, without modules and objects before it.
    pub name: &'t str,
    /// Line in the script, counted from 1.
    pub line: usize,
    /// Arguments without a name.
    pub positional: Vec<Argument<'t>>,
    /// Name and value of each other argument.
    pub named: Vec<(&'t str, Argument<'t>)>,
}

/// Value of an argument.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Argument<'t> {
    /// A literal as a shell would pass it, or a list of them.
    Words(Vec<String>),
    /// Any other expression, as it is written.
    Source(&'t str),
}

/// Calls and definitions of a script.
#[derive(Debug, Default)]
pub struct Script<'t> {
    /// Calls in their order.
    pub calls: Vec<Call<'t>>,
    /// Names of the functions of the script.
    pub functions: HashSet<&'t str>,
    /// Names of the imported modules.
    pub imports: Vec<&'t str>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// A name or a keyword.
    Name,
    Number,
    /// A string without expressions in it, with its value.
    Text(String),
    /// An opening bracket, with the index of its closing one.
    Open(usize),
    Close,
    /// The end of a statement, or a colon that may begin one.
    End,
    /// An operator.
    Sign,
    /// A string that is no plain text.
    Other,
}

#[derive(Debug)]
struct Token<'t> {
    kind: Kind,
    /// Text in the script.
    text: &'t str,
    line: usize,
}

impl Token<'_> {
    fn is(&self, sign: &str) -> bool {
        self.kind == Kind::Sign && self.text == sign
    }
}

/// Reads a script.
///
/// # Errors
/// Returns the reason why the text is no Python.
pub fn read(text: &str) -> Result<Script<'_>, String> {
    let tokens = tokens(text)?;
    let mut reader = Reader { text, names: HashMap::new() };
    let mut script = Script::default();
    // Value of the statement that is read, which its name has from the next statement on.
    let mut assigned = None;
    for (at, token) in tokens.iter().enumerate() {
        let after = tokens.get(at + 1..).unwrap_or_default();
        let begins = at == 0 || tokens[at - 1].kind == Kind::End;
        match (&token.kind, token.text, after) {
            (Kind::End, ..) => {
                if let Some((name, value)) = assigned.take() {
                    match value {
                        Argument::Words(words)
                            if words.iter().map(|word| word.len() + 1).sum::<usize>() <= MAX_VALUE =>
                        {
                            reader.names.insert(name, Argument::Words(words))
                        }
                        _ => reader.names.remove(name),
                    };
                }
            }
            (Kind::Name, "def", [name, ..]) => drop(script.functions.insert(name.text)),
            (Kind::Name, "import" | "from", [module, ..]) if begins => script.imports.push(module.text),
            (Kind::Name, name, [sign, value @ ..]) if begins && sign.is("=") => {
                let len = statement_len(value);
                assigned = Some((name, reader.argument(&value[..len])));
            }
            (Kind::Name, name, [Token { kind: Kind::Open(close), text: "(", .. }, ..])
                if CALLS.contains(&name) =>
            {
                let is_definition = at > 0 && matches!(tokens[at - 1].text, "def" | "class");
                if !is_definition {
                    script.calls.push(reader.call(token, &tokens[at + 2..*close]));
                }
            }
            _ => {}
        }
    }
    Ok(script)
}

/// Returns the number of tokens before the end of a statement.
fn statement_len(tokens: &[Token<'_>]) -> usize {
    tokens.iter().position(|token| token.kind == Kind::End).unwrap_or(tokens.len())
}

/// Splits a script into tokens. Comments and line ends in brackets are left out.
// One `match` with a case per kind of token.
fn tokens(text: &str) -> Result<Vec<Token<'_>>, String> {
    let mut tokens: Vec<Token<'_>> = Vec::new();
    let mut open: Vec<usize> = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        let (kind, len) = match c {
            '\n' if open.is_empty() => (Some(Kind::End), 1),
            '\\' if rest[1..].trim_start_matches('\r').starts_with('\n') => {
                (None, 1 + rest.find('\n').unwrap_or_default())
            }
            '#' => (None, rest.find('\n').unwrap_or(rest.len())),
            c if c.is_whitespace() || c == '\u{feff}' => (None, c.len_utf8()),
            ';' | ':' if open.is_empty() && !rest.starts_with(":=") => (Some(Kind::End), 1),
            '(' | '[' | '{' => {
                open.push(tokens.len());
                (Some(Kind::Open(0)), 1)
            }
            ')' | ']' | '}' => {
                let closes = tokens.len();
                let opened = open.pop().and_then(|opened| tokens.get_mut(opened));
                match opened {
                    Some(token) if matches!((token.text, c), ("(", ')') | ("[", ']') | ("{", '}')) => {
                        token.kind = Kind::Open(closes);
                    }
                    _ => return Err(format!("line {line}: `{c}` closes nothing")),
                }
                (Some(Kind::Close), 1)
            }
            c if c == '_' || c.is_alphabetic() => {
                let is_part = |c: char| c == '_' || c.is_alphanumeric();
                let len = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
                match rest[len..].starts_with(['"', '\'']) && len <= 2 {
                    true => {
                        let (kind, text_len) = string(&rest[len..], &rest[..len], line)?;
                        (Some(kind), len + text_len)
                    }
                    false => (Some(Kind::Name), len),
                }
            }
            '"' | '\'' => {
                let (kind, len) = string(rest, "", line)?;
                (Some(kind), len)
            }
            c if c.is_ascii_digit() || c == '.' && rest[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                (Some(Kind::Number), number_len(rest))
            }
            c => {
                let pair =
                    ["==", "!=", "<=", ">=", ":=", "->", "**", "//", "+=", "-=", "*=", "/=", "|=", "&="];
                let len =
                    pair.iter().find(|pair| rest.starts_with(**pair)).map_or(c.len_utf8(), |pair| pair.len());
                (Some(Kind::Sign), len)
            }
        };
        let written = &rest[..len];
        tokens.extend(kind.map(|kind| Token { kind, text: written, line }));
        line += written.matches('\n').count();
        at += len;
    }
    if let Some(token) = open.first().and_then(|&open| tokens.get(open)) {
        return Err(format!("line {}: `{}` is not closed", token.line, token.text));
    }
    tokens.push(Token { kind: Kind::End, text: "", line });
    Ok(tokens)
}

/// Returns the length of the number at the start of a text.
fn number_len(text: &str) -> usize {
    let mut before = ' ';
    let is_part = |c: char| {
        let part = c.is_alphanumeric() || "._".contains(c) || "+-".contains(c) && "eE".contains(before);
        before = c;
        part
    };
    let mut is_part = is_part;
    text.find(|c| !is_part(c)).unwrap_or(text.len())
}

/// Reads the string at the start of a text. Returns its kind and its length.
fn string(text: &str, prefix: &str, line: usize) -> Result<(Kind, usize), String> {
    let quote = &text[..1];
    let triple = quote.repeat(3);
    let end = if text.starts_with(&triple) { triple.as_str() } else { quote };
    let raw = prefix.contains(['r', 'R']);
    let (mut value, mut at) = (String::new(), end.len());
    loop {
        let rest = &text[at..];
        if rest.starts_with(end) {
            break;
        }
        let mut chars = rest.chars();
        match (chars.next(), chars.next()) {
            (None, _) => return Err(format!("line {line}: a string has no end")),
            (Some('\n'), _) if end.len() == 1 => return Err(format!("line {line}: a string has no end")),
            (Some('\\'), Some(escaped)) => {
                match (raw, escaped) {
                    (true, _) | (false, 'x' | 'u' | 'U' | 'N' | '0'..='7') => value.extend(['\\', escaped]),
                    (false, '\n') => {}
                    (false, 'n') => value.push('\n'),
                    (false, 't') => value.push('\t'),
                    (false, c @ ('\\' | '\'' | '"')) => value.push(c),
                    (false, c) => value.extend(['\\', c]),
                }
                at += 1 + escaped.len_utf8();
            }
            (Some(c), _) => {
                value.push(c);
                at += c.len_utf8();
            }
        }
    }
    // Braces of an f-string are expressions, and bytes are no text.
    let is_plain = match prefix.to_ascii_lowercase() {
        prefix if prefix.contains('b') => false,
        prefix if prefix.contains('f') => !value.contains(['{', '}']),
        _ => true,
    };
    Ok((if is_plain { Kind::Text(value) } else { Kind::Other }, at + end.len()))
}

struct Reader<'t> {
    text: &'t str,
    /// Literals that the script assigned to names so far.
    names: HashMap<&'t str, Argument<'t>>,
}

impl<'t> Reader<'t> {
    /// Returns the text of tokens in the script.
    fn source(&self, tokens: &[Token<'t>]) -> &'t str {
        let (Some(first), Some(last)) = (tokens.first(), tokens.last()) else { return "" };
        let start = first.text.as_ptr().addr() - self.text.as_ptr().addr();
        let end = last.text.as_ptr().addr() - self.text.as_ptr().addr() + last.text.len();
        self.text.get(start..end).unwrap_or_default()
    }

    /// Returns a value that is no list.
    fn scalar(&self, tokens: &[Token<'t>]) -> Option<Argument<'t>> {
        let one = |text: String| Some(Argument::Words(vec![text]));
        if let Some(texts) = tokens.iter().map(Token::string).collect::<Option<Vec<_>>>()
            && !texts.is_empty()
        {
            return one(texts.concat());
        }
        match tokens {
            [Token { kind: Kind::Name, text, .. }] => match *text {
                "True" | "False" => one(text.to_ascii_lowercase()),
                "None" => one("none".to_owned()),
                name => self.names.get(name).cloned(),
            },
            [Token { kind: Kind::Number, text, .. }] => one(text.replace('_', "")),
            [minus, Token { kind: Kind::Number, text, .. }] if minus.is("-") => {
                one(format!("-{}", text.replace('_', "")))
            }
            _ => None,
        }
    }

    fn argument(&self, tokens: &[Token<'t>]) -> Argument<'t> {
        let source = || Argument::Source(self.source(tokens));
        let [Token { kind: Kind::Open(_), text: open @ ("(" | "["), .. }, inner @ .., _] = tokens else {
            return self.scalar(tokens).unwrap_or_else(source);
        };
        let Some(elements) = split(inner) else { return source() };
        if *open == "(" && elements.len() == 1 && !inner.last().is_some_and(|last| last.is(",")) {
            return self.scalar(inner).unwrap_or_else(source);
        }
        let mut words = Vec::new();
        for element in elements {
            match (self.scalar(element), element) {
                (Some(Argument::Words(one)), _) if one.len() == 1 => words.extend(one),
                // A name in a list that has no value stays a name.
                (None, [Token { kind: Kind::Name, text, .. }]) => words.push((*text).to_owned()),
                _ => return source(),
            }
        }
        Argument::Words(words)
    }

    fn call(&self, name: &Token<'t>, arguments: &[Token<'t>]) -> Call<'t> {
        let mut call = Call { name: name.text, line: name.line, positional: Vec::new(), named: Vec::new() };
        for argument in split(arguments).unwrap_or_default() {
            match argument {
                [Token { kind: Kind::Name, text, .. }, sign, value @ ..] if sign.is("=") => {
                    call.named.push((text, self.argument(value)));
                }
                value => call.positional.push(self.argument(value)),
            }
        }
        call
    }
}

impl Token<'_> {
    fn string(&self) -> Option<&str> {
        match &self.kind {
            Kind::Text(value) => Some(value),
            _ => None,
        }
    }
}

/// Splits tokens at the commas that are in no bracket. Returns `None` if a bracket closes that does not open in them.
fn split<'s, 't>(tokens: &'s [Token<'t>]) -> Option<Vec<&'s [Token<'t>]>> {
    let (mut depth, mut lowest) = (0_i64, 0);
    let is_comma = |token: &Token<'_>| {
        match token.kind {
            Kind::Open(_) => depth += 1,
            Kind::Close => depth -= 1,
            _ => {}
        }
        lowest = lowest.min(depth);
        depth == 0 && token.is(",")
    };
    let parts = tokens.split(is_comma).filter(|part| !part.is_empty()).collect();
    (lowest == 0).then_some(parts)
}
#[cfg(test)]
mod tests {
    use super::*;

    fn words(words: &[&str]) -> Argument<'static> {
        Argument::Words(words.iter().map(|&word| word.to_owned()).collect())
    }

    #[test]
    fn arguments_are_literals_names_and_lists() {
        let script = read(
            r#"
from trl import GRPOConfig
max_length = 1_024
name = "a" "b"
def my_reward(completions, **kwargs):
    return [0.0]
config = GRPOConfig(
    output_dir=name, max_completion_length=max_length, beta=-0.1, bf16=True, seed=None,
    reward_weights=[1.0, 0.5], run_name=f"{name}-x", extra=max_length - 8,
)
trainer = trl.GRPOTrainer("model", args=config, reward_funcs=[my_reward, "other"], peft_config=LoraConfig(r=8))
"#,
        )
        .unwrap();
        assert_eq!((script.functions, script.imports), (HashSet::from(["my_reward"]), vec!["trl"]));
        let call = |name: &str| script.calls.iter().find(|call| call.name == name).unwrap();
        let config = call("GRPOConfig");
        assert_eq!(config.line, 7);
        let expected = [
            ("output_dir", words(&["ab"])),
            ("max_completion_length", words(&["1024"])),
            ("beta", words(&["-0.1"])),
            ("bf16", words(&["true"])),
            ("seed", words(&["none"])),
            ("reward_weights", words(&["1.0", "0.5"])),
            ("run_name", Argument::Source("f\"{name}-x\"")),
            ("extra", Argument::Source("max_length - 8")),
        ];
        assert_eq!(config.named, expected);
        let trainer = call("GRPOTrainer");
        assert_eq!(trainer.positional, [words(&["model"])]);
        assert_eq!(trainer.named[1], ("reward_funcs", words(&["my_reward", "other"])));
        assert_eq!(call("LoraConfig").named, [("r", words(&["8"]))]);
    }

    #[test]
    fn strings_brackets_and_lines_are_those_of_python() {
        let script = read(
            "\u{feff}class GRPOConfig(Base): pass\nif True: n = 4; m = [\n  1, # one\n  2]\n\
             x = r'\\d' 'a\\n' \\\n  \"\"\"it's\n\"\"\"\nGRPOConfig(n=n, m=m, x=x, y=(n), z=(n,), f=f'a', g=f'{n}', b=b'a',\n\
             k={'a': [1, 2]}, s=(1) + (2), e=1.5e-6, t=('a'\n'b'), **more)\nGRPOConfig(r=n)",
        )
        .unwrap();
        let expected = [
            ("n", words(&["4"])),
            ("m", words(&["1", "2"])),
            ("x", words(&["\\da\nit's\n"])),
            ("y", words(&["4"])),
            ("z", words(&["4"])),
            ("f", words(&["a"])),
            ("g", Argument::Source("f'{n}'")),
            ("b", Argument::Source("b'a'")),
            ("k", Argument::Source("{'a': [1, 2]}")),
            ("s", Argument::Source("(1) + (2)")),
            ("e", words(&["1.5e-6"])),
            ("t", words(&["ab"])),
        ];
        assert_eq!(script.calls[0].named, expected);
        assert_eq!((script.calls.len(), script.calls[1].line), (2, 11));
    }

    #[test]
    fn text_that_is_no_python_is_refused() {
        for (text, reason) in [
            ("def (", "line 1: `(` is not closed"),
            ("\nx = ']", "line 2: a string has no end"),
            ("x = '''", "line 1: a string has no end"),
            ("f(]", "line 1: `]` closes nothing"),
            (")", "line 1: `)` closes nothing"),
        ] {
            assert_eq!(read(text).unwrap_err(), reason);
        }
    }

    #[test]
    fn deep_and_repeated_values_are_bounded() {
        let deep = format!("GRPOConfig(x={}1{})", "[".repeat(60_000), "]".repeat(60_000));
        assert!(matches!(read(&deep).unwrap().calls[0].named[0].1, Argument::Source(_)));
        let calls = "GRPOConfig(".repeat(10_000) + &")".repeat(10_000);
        assert_eq!(read(&calls).unwrap().calls.len(), 10_000);
        let long = format!("a = [{}]\nGRPOConfig({})", "1,".repeat(60_000), "a,".repeat(60_000));
        assert!(read(&long).unwrap().calls[0].positional.iter().all(|value| *value == Argument::Source("a")));
    }
}
