//! Rewrites the source of a template so that its bounds hold for every value.
//!
//! The engine's fuel pays for instructions, text and lists. It does not see how deep values nest, how long a list is in written
//! form, or that a list contains itself. Every expression that creates or reads whole values is therefore wrapped in a call of a
//! function of [`bounds`](super::bounds): `a|sort` becomes `__value(__value(a)|sort)`. Everything outside tags stays the same, and
//! so do the line breaks.
//!
//! An expression that this module cannot read is an error, so nothing reaches the engine without its bounds. Attributes of
//! namespaces can be set by themselves (`set ns.a = …`), not as part of a tuple.

use minijinja::{Error, ErrorKind};

type Result<T> = std::result::Result<T, Error>;

/// Maximum number of tokens between `{{` and `}}`, or `{%` and `%}`. The longest published templates have about a hundred. The
/// engine recurses into chains of operators.
const MAX_TAG_TOKENS: usize = 2_000;
/// Maximum number of expressions inside each other. The engine's own limit follows soon.
const MAX_NESTING: usize = 64;

/// Function that bounds a value.
pub(super) const VALUE: &str = "__value";
/// Function that charges the length of a value if it is a string.
pub(super) const TEXT: &str = "__text";
/// Function that bounds the items of `*args`.
pub(super) const ITEMS: &str = "__items";
/// Function that sets an attribute of a namespace.
pub(super) const SET: &str = "__set";
/// Variable with the text of a `set` block that is about to become an attribute.
const BLOCK: &str = "__block";
const INFIX: [&str; 18] =
    ["and", "or", "in", "not", "+", "-", "~", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">="];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Name,
    Number,
    Text,
    Sign,
}

/// Token with the white space before it.
#[derive(Clone, Copy)]
struct Token<'s> {
    kind: Kind,
    space: &'s str,
    text: &'s str,
}

fn refuse(what: &str, line: usize) -> Error {
    Error::new(ErrorKind::SyntaxError, format!("{what} at line {line}"))
}

/// Returns the source with bounds.
pub(super) fn bounded(source: &str) -> Result<String> {
    let mut out = String::with_capacity(source.len() * 2);
    // For each open `set` block: the namespace and the attribute that get its text.
    let mut blocks: Vec<Option<String>> = Vec::new();
    let (mut rest, mut counted, mut here) = (source, source, 1);
    let lines = |from: &str, to: &str| from[..from.len() - to.len()].matches('\n').count();
    while let Some(open) = rest
        .match_indices('{')
        .map(|(at, _)| at)
        .find(|at| matches!(rest.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#')))
    {
        out.push_str(&rest[..open]);
        rest = &rest[open..];
        here += lines(counted, rest);
        counted = rest;
        let (start, inner) = rest.split_at(2);
        if start == "{#" {
            let end = inner.find("#}").ok_or_else(|| refuse("unexpected end of comment", here))? + 4;
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner);
        if start == "{%"
            && let Some(length) = basic_tag(inner, "raw")
        {
            let raw = &inner[length..];
            let end = raw.match_indices("{%").find_map(|(at, _)| {
                let tag = &raw[at + 2..];
                let tag = tag.strip_prefix(['-', '+']).unwrap_or(tag);
                Some(raw.len() - tag.len() + basic_tag(tag, "endraw")?)
            });
            let end = end.ok_or_else(|| refuse("unexpected end of raw block", here))?;
            let end = rest.len() - raw.len() + end;
            out.push_str(&rest[..end]);
            rest = &rest[end..];
            continue;
        }
        out.push_str(&rest[..rest.len() - inner.len()]);
        let (tokens, end, after) = tokens(inner, if start == "{{" { "}}" } else { "%}" })
            .map_err(|(what, at)| refuse(&what, here + lines(rest, at)))?;
        let mut tag = Tag { tokens: &tokens, nesting: 0, line: here };
        if start == "{{" {
            out.push_str(&tag.expressions()?);
        } else {
            out.push_str(&tag.statement(&mut blocks)?);
        }
        if let Some(token) = tag.tokens.first() {
            return Err(refuse(&format!("unexpected `{}`", token.text), here));
        }
        out.push_str(end);
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

/// Returns the length of `name %}`, the rest of a tag without arguments.
fn basic_tag(inner: &str, name: &str) -> Option<usize> {
    let space = |text: &'_ str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_whitespace()).len();
    let mut at = space(inner);
    at += inner[at..].strip_prefix(name).map(|_| name.len())?;
    at += space(&inner[at..]);
    at += usize::from(inner[at..].starts_with(['-', '+']));
    inner[at..].starts_with("%}").then_some(at + 2)
}

/// Splits the inside of a tag. Returns its tokens, its end with the white space before it, and the source after it. An error has
/// the source from its place on.
fn tokens<'s>(
    inner: &'s str,
    close: &str,
) -> std::result::Result<(Vec<Token<'s>>, &'s str, &'s str), (String, &'s str)> {
    let (mut tokens, mut depth, mut rest) = (Vec::new(), 0, inner);
    loop {
        let trimmed = rest.trim_start_matches(|c: char| c.is_ascii_whitespace());
        let space = &rest[..rest.len() - trimmed.len()];
        if depth == 0 {
            let end = trimmed.strip_prefix(['-', '+']).unwrap_or(trimmed);
            if let Some(after) = [end, trimmed].iter().find_map(|end| end.strip_prefix(close)) {
                return Ok((tokens, &rest[..rest.len() - after.len()], after));
            }
        }
        let Some(first) = trimmed.chars().next() else {
            return Err(("unexpected end of a tag".into(), rest));
        };
        let after_dot = tokens.last().is_some_and(|token: &Token<'_>| token.text == ".");
        let (kind, length) = match first {
            'a'..='z' | 'A'..='Z' | '_' => (Kind::Name, name_length(trimmed)),
            '0'..='9' => (Kind::Number, number_length(trimmed, after_dot)),
            '"' | '\'' => {
                let mut escaped = false;
                let end = trimmed.char_indices().skip(1).find(|&(_, c)| {
                    let end = !escaped && c == first;
                    escaped = !escaped && c == '\\';
                    end
                });
                (Kind::Text, end.ok_or_else(|| ("unexpected end of string".into(), trimmed))?.0 + 1)
            }
            _ if ["//", "**", "==", "!=", ">=", "<="].iter().any(|sign| trimmed.starts_with(sign)) => {
                (Kind::Sign, 2)
            }
            '(' | '[' | '{' | ')' | ']' | '}' => {
                depth += if matches!(first, '(' | '[' | '{') { 1 } else { -1 };
                (Kind::Sign, 1)
            }
            '+' | '-' | '*' | '/' | '%' | '.' | ',' | ':' | '~' | '|' | '=' | '>' | '<' => (Kind::Sign, 1),
            _ => return Err((format!("unexpected character {first:?}"), trimmed)),
        };
        let (text, after) = trimmed.split_at(length);
        if kind == Kind::Name && [VALUE, TEXT, ITEMS, SET, BLOCK].contains(&text) {
            return Err((format!("the name {text} is reserved"), trimmed));
        }
        if tokens.len() == MAX_TAG_TOKENS {
            return Err((format!("a tag of more than {MAX_TAG_TOKENS} tokens"), trimmed));
        }
        tokens.push(Token { kind, space, text });
        rest = after;
    }
}

fn name_length(text: &str) -> usize {
    text.bytes().take_while(|&b| b == b'_' || b.is_ascii_alphanumeric()).count()
}

/// Returns the length of a number. After a point it is an index, which has no fraction.
fn number_length(text: &str, after_dot: bool) -> usize {
    let bytes = text.as_bytes();
    if let [b'0', radix @ (b'b' | b'B' | b'o' | b'O' | b'x' | b'X'), digits @ ..] = bytes {
        let hex = matches!(radix, b'x' | b'X');
        let digit = |b: &u8| *b == b'_' || b.is_ascii_digit() || hex && b.is_ascii_hexdigit();
        return 2 + digits.iter().take_while(|b| digit(b)).count();
    }
    let digits = |from: usize| bytes[from..].iter().take_while(|&&b| b == b'_' || b.is_ascii_digit()).count();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let mut length = digits(0);
    if after_dot {
        return length;
    }
    if bytes.get(length) == Some(&b'.') && is_digit(length + 1) {
        length += 1 + digits(length + 1);
    }
    if matches!(bytes.get(length), Some(b'e' | b'E')) {
        let sign = usize::from(matches!(bytes.get(length + 1), Some(b'+' | b'-')));
        if is_digit(length + 1 + sign) {
            length += 1 + sign + digits(length + 1 + sign);
        }
    }
    length
}

/// Reader of the tokens of a tag. Each method returns the rewritten text of what it has read.
struct Tag<'t, 's> {
    tokens: &'t [Token<'s>],
    nesting: usize,
    line: usize,
}

/// Operand of an expression.
struct Operand {
    text: String,
    /// Whether the value needs no bound: it is a literal without items, or it has one.
    bounded: bool,
    /// Text without the bound of the last call, for tags that need a call.
    call: String,
}

impl Operand {
    fn new(text: String, bounded: bool) -> Self {
        Self { call: text.clone(), text, bounded }
    }

    fn made(call: String) -> Self {
        Self { text: wrapped(VALUE, &call), bounded: true, call }
    }

    fn bound(self) -> String {
        if self.bounded { self.text } else { wrapped(VALUE, &self.text) }
    }

    fn charged(self) -> String {
        if self.bounded { self.text } else { wrapped(TEXT, &self.text) }
    }
}

fn wrapped(function: &str, text: &str) -> String {
    format!(" {function}({text})")
}

/// Part of an expression between signs of one level.
enum Part {
    Sign(String),
    Operand(Operand),
}

impl<'s> Tag<'_, 's> {
    fn peek(&self) -> &'s str {
        self.tokens.first().map_or("", |token| token.text)
    }

    fn is_name(&self) -> bool {
        self.tokens.first().is_some_and(|token| token.kind == Kind::Name)
    }

    fn unexpected<T>(&self) -> Result<T> {
        Err(match self.tokens.first() {
            Some(token) => refuse(&format!("unexpected `{}`", token.text), self.line),
            None => refuse("unexpected end of a tag", self.line),
        })
    }

    /// Reads one token. Tokens are separated, so that the engine sees the same ones.
    fn next(&mut self) -> Result<String> {
        let Some((token, rest)) = self.tokens.split_first() else { return self.unexpected() };
        self.tokens = rest;
        let space = if token.space.is_empty() { " " } else { token.space };
        Ok(format!("{space}{}", token.text))
    }

    fn expect(&mut self, text: &str) -> Result<String> {
        if self.peek() == text && !self.tokens.is_empty() { self.next() } else { self.unexpected() }
    }

    fn name(&mut self) -> Result<String> {
        if self.is_name() { self.next() } else { self.unexpected() }
    }

    /// Reads one expression, or several with commas between them, which make a tuple.
    fn expressions(&mut self) -> Result<String> {
        let mut out = self.expression(true)?;
        if self.peek() != "," {
            return Ok(out);
        }
        while self.peek() == "," {
            out += &self.next()?;
            if !self.tokens.is_empty() {
                out += &self.expression(true)?;
            }
        }
        Ok(wrapped(VALUE, &format!("({out})")))
    }

    /// Reads an expression. With `choice` it may contain `… if … else …`.
    fn expression(&mut self, choice: bool) -> Result<String> {
        Ok(self.operand_of(choice)?.text)
    }

    fn operand_of(&mut self, choice: bool) -> Result<Operand> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return Err(refuse(&format!("expressions nested deeper than {MAX_NESTING}"), self.line));
        }
        let mut parts = Vec::new();
        loop {
            while self.peek() == "not" {
                parts.push(Part::Sign(self.next()?));
            }
            let operand = self.operand()?;
            let more = match self.peek() {
                "if" | "else" => choice,
                sign => INFIX.contains(&sign),
            };
            if !more && parts.is_empty() {
                self.nesting -= 1;
                return Ok(operand);
            }
            parts.push(Part::Operand(operand));
            if !more {
                self.nesting -= 1;
                return Ok(joined(parts));
            }
            let mut sign = self.next()?;
            if sign.trim_start() == "not" {
                sign += &self.expect("in")?;
            }
            parts.push(Part::Sign(sign));
        }
    }

    /// Reads an operand with its filters and tests.
    fn operand(&mut self) -> Result<Operand> {
        let mut operand = self.negated()?;
        loop {
            match self.peek() {
                "|" => {
                    let bar = self.next()?;
                    let (length, filter) = self.filter()?;
                    // The number of turns is asked once per turn of a long conversation.
                    let of = if length { operand.text } else { operand.bound() };
                    operand = Operand::made(of + &bar + &filter);
                }
                "is" => {
                    let mut test = self.next()?;
                    if self.peek() == "not" {
                        test += &self.next()?;
                    }
                    let name = self.dotted()?;
                    test += &name;
                    let argument = self.tokens.first().is_some_and(|token| {
                        !matches!(token.kind, Kind::Sign) || matches!(token.text, "-" | "[" | "{")
                    }) && !matches!(self.peek(), "and" | "or" | "else" | "is");
                    if self.peek() == "(" {
                        let arguments = self.arguments(true)?;
                        operand = Operand::new(operand.bound() + &test + &arguments, true);
                    } else if argument {
                        let argument = self.negated()?.bound();
                        operand = Operand::new(operand.bound() + &test + &argument, true);
                    } else if matches!(name.trim_start(), "defined" | "undefined" | "none") {
                        operand = Operand::new(operand.text + &test, true);
                    } else {
                        operand = Operand::new(operand.charged() + &test, true);
                    }
                }
                _ => return Ok(operand),
            }
        }
    }

    /// Reads the name of a filter and its arguments, and returns whether the filter takes the length.
    fn filter(&mut self) -> Result<(bool, String)> {
        let mut filter = self.dotted()?;
        let length = matches!(filter.trim_start(), "length" | "count") && self.peek() != "(";
        if self.peek() == "(" {
            filter += &self.arguments(true)?;
        }
        Ok((length, filter))
    }

    fn dotted(&mut self) -> Result<String> {
        let mut out = self.name()?;
        while self.peek() == "." {
            out += &self.next()?;
            out += &self.name()?;
        }
        Ok(out)
    }

    /// Reads an operand without filters and tests, with its minus signs.
    fn negated(&mut self) -> Result<Operand> {
        let mut signs = String::new();
        while self.peek() == "-" {
            signs += &self.next()?;
        }
        let operand = self.chain()?;
        Ok(if signs.is_empty() { operand } else { Operand::new(signs + &operand.text, operand.bounded) })
    }

    /// Reads a value with its attributes, items and calls.
    fn chain(&mut self) -> Result<Operand> {
        let special = matches!(self.peek(), "loop" | "self");
        let mut operand = self.primary()?;
        let mut links = 0;
        loop {
            links += 1;
            match self.peek() {
                "." => {
                    let mut link = self.next()?;
                    let index = self.tokens.first().is_some_and(|token| token.kind == Kind::Number);
                    link += &self.next()?;
                    if index {
                        operand = Operand::new(wrapped(TEXT, &operand.text) + &link, false);
                    } else if self.peek() == "(" {
                        let of = if special && links == 1 { operand.text } else { operand.bound() };
                        operand = Operand::made(of + &link + &self.arguments(true)?);
                    } else {
                        operand = Operand::new(operand.text + &link, false);
                    }
                }
                "[" => {
                    let (slice, item) = self.item()?;
                    operand = if slice {
                        Operand::made(operand.bound() + &item)
                    } else {
                        Operand::new(wrapped(TEXT, &operand.text) + &item, false)
                    };
                }
                "(" => operand = Operand::made(operand.text + &self.arguments(false)?),
                _ => return Ok(operand),
            }
        }
    }

    /// Reads `[…]` after a value, and returns whether it is a slice.
    fn item(&mut self) -> Result<(bool, String)> {
        let mut out = self.expect("[")?;
        let mut slice = false;
        while self.peek() != "]" {
            if self.peek() == ":" {
                slice = true;
                out += &self.next()?;
            } else {
                out += &self.operand_of(true)?.bound();
            }
        }
        out += &self.next()?;
        Ok((slice, out))
    }

    fn primary(&mut self) -> Result<Operand> {
        let Some(token) = self.tokens.first() else { return self.unexpected() };
        match (token.kind, token.text) {
            (Kind::Name, "and" | "or" | "not" | "in" | "is" | "if" | "else") => self.unexpected(),
            (Kind::Name, name) => {
                let literal = matches!(name, "true" | "True" | "false" | "False" | "none" | "None");
                Ok(Operand::new(self.next()?, literal))
            }
            (Kind::Number, _) => Ok(Operand::new(self.next()?, true)),
            (Kind::Text, _) => {
                let mut text = self.next()?;
                while self.tokens.first().is_some_and(|token| token.kind == Kind::Text) {
                    text += &self.next()?;
                }
                Ok(Operand::new(text, true))
            }
            (Kind::Sign, "(") => {
                let (count, text) = self.list(")")?;
                Ok(if count == 1 { Operand::new(text, false) } else { Operand::made(text) })
            }
            (Kind::Sign, "[") => Ok(Operand::made(self.list("]")?.1)),
            (Kind::Sign, "{") => Ok(Operand::made(self.list("}")?.1)),
            _ => self.unexpected(),
        }
    }

    /// Reads a list, tuple, dict or an expression in parentheses, and returns the number of its items, or two if it ends with a comma.
    fn list(&mut self, close: &str) -> Result<(usize, String)> {
        let (mut count, mut out) = (0, self.next()?);
        while self.peek() != close {
            out += &self.expression(true)?;
            if close == "}" {
                out += &self.expect(":")?;
                out += &self.expression(true)?;
            }
            count += 1;
            if self.peek() == "," {
                out += &self.next()?;
                count = count.max(2);
            } else if self.peek() != close {
                return self.unexpected();
            }
        }
        out += &self.next()?;
        Ok((count, out))
    }

    /// Reads the arguments of a call. With `bound`, all of them get bounds. Without it, only their length is charged: the
    /// callee may be a loop, which reads the whole of a text.
    fn arguments(&mut self, bound: bool) -> Result<String> {
        let mut out = self.expect("(")?;
        while self.peek() != ")" {
            let sign = self.peek();
            if matches!(self.peek(), "*" | "**") {
                out += &self.next()?;
            } else if self.is_name() && self.tokens.get(1).is_some_and(|token| token.text == "=") {
                out += &self.next()?;
                out += &self.next()?;
            }
            let argument = self.operand_of(true)?;
            out += &match sign {
                "*" => wrapped(ITEMS, &argument.text),
                _ if bound || sign == "**" => argument.bound(),
                _ => argument.charged(),
            };
            if self.peek() == "," {
                out += &self.next()?;
            } else if self.peek() != ")" {
                return self.unexpected();
            }
        }
        out += &self.next()?;
        Ok(out)
    }

    /// Reads the names that an assignment sets.
    fn targets(&mut self) -> Result<String> {
        let mut out = String::new();
        while self.is_name() && self.peek() != "in" || matches!(self.peek(), "(" | ")" | ",") {
            out += &self.next()?;
        }
        Ok(out)
    }

    /// Reads the parameters of a macro.
    fn parameters(&mut self) -> Result<String> {
        let mut out = self.expect("(")?;
        while self.peek() != ")" {
            out += &self.name()?;
            if self.peek() == "=" {
                out += &self.next()?;
                out += &self.expression(true)?;
            }
            if self.peek() == "," {
                out += &self.next()?;
            } else if self.peek() != ")" {
                return self.unexpected();
            }
        }
        out += &self.next()?;
        Ok(out)
    }

    /// Reads a `{% … %}` tag. `blocks` has an item for each open `set` block.
    fn statement(&mut self, blocks: &mut Vec<Option<String>>) -> Result<String> {
        let name = self.peek();
        if name == "set" {
            return self.set(blocks);
        }
        let mut out = self.name()?;
        match name {
            "if" | "elif" => out += &self.expression(false)?,
            "include" | "extends" | "import" | "from" => {
                return Err(refuse(
                    &format!("unsupported tag `{name}` (there is no other template)"),
                    self.line,
                ));
            }
            "autoescape" => out += &self.expression(true)?,
            "for" => {
                out += &self.targets()?;
                out += &self.expect("in")?;
                out += &wrapped(TEXT, &self.expression(false)?);
                if self.peek() == "if" {
                    out += &self.next()?;
                    out += &self.expression(true)?;
                }
            }
            "with" => {
                while !self.tokens.is_empty() {
                    out += &self.targets()?;
                    out += &self.expect("=")?;
                    out += &self.expression(true)?;
                    if !self.tokens.is_empty() {
                        out += &self.expect(",")?;
                    }
                }
            }
            "macro" => {
                out += &self.name()?;
                out += &self.parameters()?;
            }
            "call" => {
                if self.peek() == "(" {
                    out += &self.parameters()?;
                }
                out += &self.operand()?.call;
            }
            "do" => out += &self.operand()?.call,
            "filter" => out += &self.filter()?.1,
            "endset" => {
                if let Some(Some(of)) = blocks.pop() {
                    out += &format!(" %}}{{% do {SET}({of}, {BLOCK})");
                }
            }
            _ => {}
        }
        // `recursive`, or the name of a block.
        while self.is_name() {
            out += &self.next()?;
        }
        Ok(out)
    }

    /// Reads a `set` tag. An attribute of a namespace is set by a call.
    fn set(&mut self, blocks: &mut Vec<Option<String>>) -> Result<String> {
        let set = self.expect("set")?;
        let mut target = self.targets()?;
        if self.peek() == "." && target.contains(['(', ',']) {
            return Err(refuse("an attribute can only be set by itself", self.line));
        }
        // The last attribute, with its point: the engine gets its name as a text.
        let mut attribute: Option<(String, String)> = None;
        while self.peek() == "." {
            let (point, name) = (self.next()?, self.name()?);
            if let Some((point, name)) = attribute.replace((point, name)) {
                target = target + &point + &name;
            }
        }
        let attribute = attribute.map(|(point, name)| {
            let space = name.len() - name.trim_start().len();
            format!("{}{}'{}'", point.replace('.', ","), &name[..space], &name[space..])
        });
        if self.tokens.is_empty() || self.peek() == "|" {
            let mut out = set;
            match attribute {
                Some(attribute) => {
                    let of = target + &attribute;
                    out.extend(of.chars().filter(char::is_ascii_whitespace));
                    out += BLOCK;
                    blocks.push(Some(of.replace('\n', " ")));
                }
                None => {
                    blocks.push(None);
                    out += &target;
                }
            }
            if self.peek() == "|" {
                out += &self.next()?;
                out += &self.filter()?.1;
            }
            return Ok(out);
        }
        let sign = self.expect("=")?;
        let value = self.expressions()?;
        Ok(match attribute {
            Some(attribute) => {
                format!(
                    "{} {SET}({target}{attribute}{}{value})",
                    set.replace("set", "do"),
                    sign.replace('=', ",")
                )
            }
            None => set + &target + &sign + &value,
        })
    }
}

/// Joins the parts of an expression. Products get a bound each; comparisons and `~` read whole values, so all operands beside them
/// get one; a sum makes a list or text.
fn joined(parts: Vec<Part>) -> Operand {
    let signs = || {
        parts.iter().filter_map(|part| match part {
            Part::Sign(sign) => Some(sign.trim()),
            Part::Operand(_) => None,
        })
    };
    let reads = signs()
        .any(|sign| matches!(sign, "==" | "!=" | "<" | "<=" | ">" | ">=" | "~") || sign.ends_with("in"));
    let sum = signs().any(|sign| sign == "+");
    let (mut out, mut product, mut times) = (String::new(), String::new(), false);
    let end = |product: &mut String, times: &mut bool| {
        let product = std::mem::take(product);
        if std::mem::take(times) { wrapped(VALUE, &product) } else { product }
    };
    for part in parts {
        match part {
            Part::Operand(operand) => product += &if reads { operand.bound() } else { operand.text },
            Part::Sign(sign) if matches!(sign.trim(), "*" | "/" | "//" | "%" | "**") => {
                times |= sign.trim() == "*";
                product += &sign;
            }
            Part::Sign(sign) => {
                out += &end(&mut product, &mut times);
                out += &sign;
            }
        }
    }
    out += &end(&mut product, &mut times);
    if sum { Operand::made(out) } else { Operand::new(out, false) }
}

#[cfg(test)]
mod tests {
    use minijinja::{Environment, context};
    use proptest::prelude::*;

    use super::{super::bounds, bounded};

    /// Returns the rewritten source with the white space of its tags removed.
    fn rewritten(source: &str) -> String {
        bounded(source).unwrap().replace(' ', "")
    }

    #[test]
    fn expressions_that_create_values_get_a_bound() {
        for (source, expected) in [
            ("a {{ b.c }} {# {{ [1] }} #}", "a{{b.c}}{#{{[1]}}#}"),
            ("{% raw %}{{ [1] }}{% endraw %}{{ [1] }}", "{%raw%}{{[1]}}{%endraw%}{{__value([1])}}"),
            ("{{ a|f(b)|length }}", "{{__value(__value(__value(a)|f(__value(b)))|length)}}"),
            ("{{ messages|length }}", "{{__value(messages|length)}}"),
            ("{{ -a|abs }}", "{{__value(__value(-a)|abs)}}"),
            ("{{ a.b(c)[0].d }}", "{{__text(__value(__value(a).b(__value(c))))[0].d}}"),
            ("{{ a[1:] }}", "{{__value(__value(a)[1:])}}"),
            (
                "{{ loop(a) }}{{ loop.cycle('a') }}",
                "{{__value(loop(__text(a)))}}{{__value(loop.cycle('a'))}}",
            ),
            ("{{ a * 2 + b }}", "{{__value(__value(a*2)+b)}}"),
            ("{{ a == 'b' and c }}", "{{__value(a)=='b'and__value(c)}}"),
            ("{{ a is defined }}{{ a is eq b }}", "{{aisdefined}}{{__value(a)iseq__value(b)}}"),
            ("{{ f(*a, b=[c]) }}", "{{__value(f(*__items(a),b=__value([c])))}}"),
            ("{{ f(**a) }}", "{{__value(f(**__value(a)))}}"),
            ("{{ a.0.b is not lower }}", "{{__text(__text(a).0.b)isnotlower}}"),
            ("{{ 0x1if a else 0b_1if b else 1if c }}", "{{0x1ifaelse0b_1ifbelse1ifc}}"),
            ("{% set a = b, c %}", "{%seta=__value((b,c))%}"),
            ("{%- set a.b = c if d else e -%}", "{%-do__set(a,'b',cifdelsee)-%}"),
            ("{% set a.b %}x{%- endset -%}", "{%set__block%}x{%-endset%}{%do__set(a,'b',__block)-%}"),
            ("{% for a in b if c recursive %}", "{%forain__text(b)ifcrecursive%}"),
            ("{% call(a) b([c]) %}{% endcall %}", "{%call(a)b(__value([c]))%}{%endcall%}"),
        ] {
            assert_eq!(rewritten(source), expected, "{source}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_an_error_with_its_line() {
        for (source, expected) in [
            ("\n{{ 1 $ 2 }}", "unexpected character '$' at line 2"),
            ("{{ a\n b }}", "unexpected `b` at line 1"),
            ("{# ", "unexpected end of comment at line 1"),
            ("{% raw %}{% endraw", "unexpected end of raw block at line 1"),
            ("{{ 'a\n }}", "unexpected end of string at line 1"),
            ("{{ f(a b) }}", "unexpected `b` at line 1"),
            ("{{ a", "unexpected end of a tag at line 1"),
            ("{{ a }\n}", "unexpected end of a tag at line 2"),
            ("{{ }}", "unexpected end of a tag at line 1"),
            ("{% set (a, b.c) = d %}", "an attribute can only be set by itself at line 1"),
            ("{% include 'a' %}", "unsupported tag `include` (there is no other template) at line 1"),
            ("{% filter trim|upper %}", "unexpected `|` at line 1"),
            ("{% set a | trim|upper %}", "unexpected `|` at line 1"),
            ("\n\n{{ __items }}", "the name __items is reserved at line 3"),
        ] {
            let error = bounded(source).unwrap_err().to_string();
            assert_eq!(error, format!("syntax error: {expected}"), "{source}");
        }
    }

    /// Returns expressions of all kinds, with few parentheses, so that precedence matters.
    fn expression() -> impl Strategy<Value = String> {
        let leaf = prop::sample::select(vec![
            "a",
            "n",
            "d",
            "l",
            "none",
            "true",
            "2",
            "0.5",
            "'x'",
            "'y' 'z'",
            "[1, 2]",
            "(1, 'b')",
            "{'k': 1}",
            "missing",
            "d.k",
            "l[0]",
            "l.1",
            "d['k']",
            "a[1]",
            "loop.index",
            "f(n)",
            "range(3)|list",
        ]);
        leaf.prop_map(str::to_owned).prop_recursive(5, 24, 3, |inner| {
            let signs = prop::sample::select(vec![
                "+", "-", "~", "/", "//", "%", "==", "!=", "<", "<=", ">", ">=", "in", "not in", "and", "or",
            ]);
            let before = prop::sample::select(vec!["-", "- -"]);
            let after = prop::sample::select(vec![
                "|length",
                "|upper",
                "|list",
                "|first",
                "|string",
                "|join('-')|upper",
                "|map('string')|join",
                ".k",
                "[0]",
                "[-1]",
                "[1:]|join",
                "[::-1]|join",
                ".upper()",
                ".get('k', n)",
                ".split('x')[0]",
            ]);
            let with = prop::sample::select(vec![
                "# if @ else n",
                "[#, @]",
                "(#, @)",
                "(#)",
                "(# @)",
                "{'k': #, #: @}",
                "#|default(@)",
                "(# is eq @)",
                "# is not in(@)",
                "#[@]",
                "#[@:]|join",
                "f(#)",
                "f(*#)",
                "dict(k=#, m=@).k",
                "#.get(@)",
                "(# if @)",
                "(not # in @)",
                "(# is defined)",
                "(@ in # is not none)",
                "(@ ~ # is string|upper)",
                "(n and not # == @ or d)",
                "2 * n ~ #",
                "# + 2 * -n",
                "'x' * n in @",
                "- n * n ~ #|string * 2",
            ]);
            prop_oneof![
                (inner.clone(), signs, inner.clone()).prop_map(|(a, sign, b)| format!("{a} {sign} {b}")),
                (before, inner.clone()).prop_map(|(before, a)| format!("{before}{a}")),
                (inner.clone(), after).prop_map(|(a, after)| format!("{a}{after}")),
                (inner.clone(), with, inner).prop_map(|(a, with, b)| with.replace('#', &a).replace('@', &b)),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// With bounds an expression means what it means to the engine alone. Computed lists are left out: the engine does not
        /// compare them with plain ones.
        #[test]
        fn bounds_keep_the_meaning(a in expression(), b in expression(), c in expression()) {
            let source = format!(
                "{{% macro f(x, y) %}}<{{{{ x }}}}{{{{ y }}}}>{{% endmacro %}}{{% for i in [1, 2] %}}{{% if {a} %}}{{{{ {b} }}}}{{% else %}}\
                 {{% set s = {b} %}}{{{{ s }}}}{{% for x in {c} %}}{{{{ x }}}},{{% endfor %}}{{% endif %}}{{% endfor %}}"
            );
            let mut env = Environment::new();
            env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
            let context = || context! { a => "axb", n => 3, d => context! { k => "v" }, l => [4, 5] };
            let plain = env.render_str(&source, context());
            bounds::install(&mut env);
            let here = bounded(&source).and_then(|source| env.render_str(&source, context()));
            match (&plain, &here) {
                (Ok(plain), Ok(here)) => prop_assert_eq!(plain, here, "{}", source),
                (Err(_), Err(_)) => {}
                _ => prop_assert!(false, "{}\n{:?}\n{:?}", source, plain, here),
            }
        }
    }
}
