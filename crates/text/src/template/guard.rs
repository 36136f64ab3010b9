//! Bounds on the run of a template: stack, depth of values, work and memory.
//!
//! The engine counts instructions, which bounds loops but not the cost of a single instruction. A string appended to itself
//! doubles, a list can contain itself, and a filter accepts widths of a billion. After compilation, every instruction that
//! creates or reads whole values is therefore replaced by a call of a function in this module, which checks the operands first.
//! Parsing and runs use threads whose stack ([`STACK_BYTES`]) suffices for the deepest permitted value and expression.
//!
//! These are reported as errors: chained comparisons (`a < b < c`), `*args` in filters, tests and methods, namespaces inside
//! lists, dicts and namespaces, and filters by name in `map`, except simple ones.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use minijinja::machinery::{Instruction, Instructions, Token, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};

type Result<T> = std::result::Result<T, Error>;

/// Stack size of a template thread, bytes. It suffices for [`MAX_TAG_TOKENS`] nested expressions and for values of [`MAX_DEPTH`].
/// Only the touched part takes memory.
pub(super) const STACK_BYTES: usize = 64 << 20;
/// Maximum number of tokens between `{{` and `}}`, or `{%` and `%}`. The longest published templates have about a hundred.
const MAX_TAG_TOKENS: usize = 2_000;
/// Maximum number of multiplications in a template. Products of constants are computed during compilation, and each can take 100
/// MB.
const MAX_PRODUCTS: usize = 8;
const MAX_DEPTH: usize = 100;
/// Budget of a run. `work` counts visited values and blocks of 64 bytes of text; `memory` counts the bytes of all strings and
/// lists created.
#[derive(Clone, Copy)]
pub(super) struct Bounds {
    work: u64,
    memory: u64,
}

/// Budget of a render, more than a conversation of a thousand turns needs.
pub(super) const RENDER: Bounds = Bounds { work: 1 << 23, memory: 256 << 20 };
/// Budget of a trial with a conversation of a few words.
pub(super) const TRIAL: Bounds = Bounds { work: 1 << 20, memory: 16 << 20 };
/// Filters that `map`, `select` and similar filters may apply to each item. Their results are at most a few times as long as the
/// item.
const SIMPLE: [&str; 12] = [
    "trim",
    "upper",
    "lower",
    "title",
    "capitalize",
    "string",
    "length",
    "count",
    "int",
    "float",
    "first",
    "last",
];

thread_local! {
    /// Remaining budget of the run on this thread. A thread has one run at a time.
    static LEFT: Cell<Bounds> = const { Cell::new(RENDER) };
}

/// Starts a run with these bounds on this thread.
pub(super) fn begin(bounds: Bounds) {
    LEFT.set(bounds);
}

fn refuse(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, what.into())
}

fn work(amount: u64) -> Result<()> {
    let left = LEFT.get();
    let work = left.work.checked_sub(amount);
    let work = work.ok_or_else(|| refuse("takes too much work; simplify the template"))?;
    LEFT.set(Bounds { work, ..left });
    Ok(())
}

/// Returns an error if `bytes` more would exceed the budget.
fn fits(bytes: u64) -> Result<()> {
    match LEFT.get().memory {
        left if bytes <= left => Ok(()),
        left => {
            Err(refuse(format!("makes too much text or too long lists; {left} bytes of the budget remained")))
        }
    }
}

fn memory(bytes: u64) -> Result<()> {
    fits(bytes)?;
    let left = LEFT.get();
    LEFT.set(Bounds { memory: left.memory - bytes, ..left });
    Ok(())
}

/// Returns the approximate number of bytes of a value in written form. The traversal counts as work.
fn size(value: &Value, depth: usize) -> Result<u64> {
    if depth > MAX_DEPTH {
        return Err(refuse(format!("nests values deeper than {MAX_DEPTH}")));
    }
    if let Some(text) = value.as_str() {
        work(1 + text.len() as u64 / 64)?;
        return Ok(2 + text.len() as u64);
    }
    work(1)?;
    if depth > 0 && value.downcast_object_ref::<Namespace>().is_some() {
        return Err(refuse("puts a namespace into another value"));
    }
    let mut total = 8;
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                total += size(&item, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                total += size(&key, depth + 1)? + size(&value.get_item(&key)?, depth + 1)?;
            }
        }
        _ => {}
    }
    Ok(total)
}

fn size_of_all(values: &[Value]) -> Result<u64> {
    values.iter().try_fold(0, |sum, value| Ok(sum + size(value, 0)?))
}

/// Charges a newly created value to the budget and makes lazy sequences concrete, so that views of views cannot accumulate.
fn made(value: Value) -> Result<Value> {
    if let Some(text) = value.as_str() {
        memory(text.len() as u64)?;
        return Ok(value);
    }
    let len = value.len().unwrap_or(0) as u64;
    let value = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable
            if !value.is_tuple() && value.downcast_object_ref::<Vec<Value>>().is_none() =>
        {
            let mut items = Vec::new();
            for item in value.try_iter()? {
                memory(32)?;
                items.push(item);
            }
            Value::from(items)
        }
        ValueKind::Seq | ValueKind::Iterable => {
            memory(32 * len)?;
            value
        }
        ValueKind::Map => {
            memory(64 * len)?;
            value
        }
        _ => value,
    };
    size(&value, 0)?;
    Ok(value)
}

/// Charges a value that is about to be written.
pub(super) fn written(value: &Value, state: &State) -> Result<()> {
    let plain = value.as_str().is_some() && matches!(state.auto_escape(), AutoEscape::None);
    memory(size(value, 0)? * if plain { 1 } else { 6 })
}

/// Returns the largest number among the positional and keyword arguments.
fn largest(args: &[Value]) -> u64 {
    let number = |value: Value| i64::try_from(value).map_or(0, i64::unsigned_abs);
    let named = |value: &Value| {
        let keys = value.try_iter().ok().filter(|_| value.is_kwargs()).into_iter().flatten();
        keys.filter_map(|key| value.get_item(&key).ok()).map(number).max().unwrap_or(0)
    };
    args.iter().map(|value| number(value.clone()).max(named(value))).max().unwrap_or(0)
}

/// Checks in advance that the result of a filter or method fits into the budget.
fn check_growth(name: &str, args: &[Value]) -> Result<()> {
    if matches!(name, "length" | "count") && args.len() == 1 && args[0].as_str().is_none() {
        return Ok(()); // asked once per turn of a long conversation
    }
    let size = size_of_all(args)?;
    let text = |i: usize| args.get(i).and_then(Value::as_str);
    let len = |i: usize| args.get(i).and_then(Value::len).unwrap_or(0) as u64;
    let wide = largest(args.get(1..).unwrap_or_default());
    let result = match name {
        "replace" => match (text(0), text(1), text(2)) {
            (Some(all), Some(from), Some(to)) => {
                work(all.len() as u64 / 16)?;
                size + all.matches(from).count() as u64 * to.len() as u64
            }
            _ => size.saturating_mul(size),
        },
        "join" => size + len(0).saturating_mul(text(1).map_or(0, str::len) as u64),
        "indent" => {
            let lines = text(0).map_or(0, |text| text.lines().count()) as u64 + 1;
            let spaces = lines.saturating_mul(wide.max(text(1).map_or(0, str::len) as u64));
            // The spaces are created even if the text has one line and none of them remains in the result.
            work(spaces / 64)?;
            size.saturating_add(spaces)
        }
        // Each piece is a separate list and may be as short as one character.
        "slice" | "batch" => size.saturating_add(len(0).saturating_add(wide).saturating_mul(112)),
        "format" => {
            // Widths and precisions are in the format text, or in arguments if it says so.
            let text = text(0).unwrap_or_default();
            let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
            let widths =
                numbers.fold(0u64, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(u64::MAX)));
            let given = text.bytes().filter(|b| matches!(b, b'*' | b'{')).count() as u64;
            size.saturating_mul(4).saturating_add(widths).saturating_add(given.saturating_mul(largest(args)))
        }
        "split" => match text(1) {
            Some(at) if !at.is_empty() => size + 48 * text(0).unwrap_or_default().matches(at).count() as u64,
            _ => size.saturating_mul(24),
        },
        "list" | "lines" | "splitlines" | "chain" | "zip" | "items" => size.saturating_mul(32),
        "pprint" => size.saturating_mul(4 * MAX_DEPTH as u64),
        "map" | "select" | "reject" | "selectattr" | "rejectattr" | "sum" => {
            if name == "map" && text(1).is_some_and(|filter| !SIMPLE.contains(&filter)) {
                return Err(refuse(format!(
                    "map: the filter is {:?}, expected one of {}",
                    text(1),
                    SIMPLE.join(", ")
                )));
            }
            let each = if name == "sum" { size } else { size_of_all(args.get(1..).unwrap_or_default())? };
            work(len(0).saturating_mul(each) / 64)?;
            size.saturating_mul(4).max(len(0).saturating_mul(32))
        }
        "sort" | "unique" | "groupby" | "dictsort" | "min" | "max" => {
            work(size)?;
            size.saturating_mul(4)
        }
        _ => size.saturating_mul(6),
    };
    fits(result)
}

/// Names of the functions that replace operators, with the expressions that the engine evaluates for them.
const OPERATORS: [(&str, &str); 10] = [
    ("+", "a + b"),
    ("~", "a ~ b"),
    ("*", "a * b"),
    ("==", "a == b"),
    ("!=", "a != b"),
    ("<", "a < b"),
    ("<=", "a <= b"),
    (">", "a > b"),
    (">=", "a >= b"),
    ("in", "a in b"),
];
const SLICE: &str = "[:]";
const ITEM: &str = "[]";
const FILTER: &str = "|";
const TEST: &str = "is?";
const METHOD: &str = ".";
const MADE: &str = "made!";
const SET: &str = ".=";
const SPLAT: &str = "*args";
const EACH: &str = "for";

/// Engine without bounds, for single operators.
static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(Environment::new);

/// Evaluates an expression. An error gets the line of the template's instruction, not a line of the expression.
fn evaluated(expression: &'static str, operands: Value) -> Result<Value> {
    let value = PLAIN.compile_expression(expression).and_then(|expression| expression.eval(operands));
    value.map_err(|e| Error::new(e.kind(), e.detail().unwrap_or("failed").to_owned()))
}

fn operator(name: &str, expression: &'static str, args: &[Value]) -> Result<Value> {
    let [a, b] = args else { return Err(refuse(format!("{name}: expected two operands"))) };
    let both = size_of_all(args)?;
    let times = |value: &Value, count: &Value| {
        let bytes = if value.as_str().is_some() { 1 } else { 32 };
        value.len().map_or(0, |len| (bytes * len as u64).saturating_mul(largest(std::slice::from_ref(count))))
    };
    fits(match name {
        "*" => times(a, b).max(times(b, a)),
        _ => both.saturating_mul(if a.as_str().is_some() && b.as_str().is_some() { 1 } else { 6 }),
    })?;
    let operands = Value::from_pairs([("a", a.clone()), ("b", b.clone())]);
    made(evaluated(expression, operands)?)
}

/// Function that receives its arguments unconverted. The engine's own conversions reject keyword arguments among others.
struct Raw<F>(F);

impl<F> std::fmt::Debug for Raw<F> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("<function>")
    }
}

impl<F: Fn(&mut State, &[Value]) -> Result<Value> + Send + Sync + 'static> Object for Raw<F> {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State, args: &[Value]) -> Result<Value> {
        self.0(state, args)
    }
}

fn add(
    env: &mut Environment,
    name: &'static str,
    function: impl Fn(&mut State, &[Value]) -> Result<Value> + Send + Sync + 'static,
) {
    env.add_global(name, Value::from_object(Raw(function)));
}

/// Splits off the last argument, which is the name from the instruction.
fn named(args: &[Value]) -> Result<(&[Value], &str)> {
    let split = args.split_last().and_then(|(name, args)| Some((args, name.as_str()?)));
    split.ok_or_else(|| refuse("a call without a name"))
}

fn unknown(kind: &str, name: &str) -> impl Fn(Error) -> Error {
    let what = format!("{kind} {name} is unknown");
    move |error| match error.kind() {
        ErrorKind::UnknownFilter | ErrorKind::UnknownTest if error.detail().is_none() => {
            Error::new(error.kind(), what.clone())
        }
        _ => error,
    }
}

fn exactly<const N: usize>(args: &[Value]) -> Result<&[Value; N]> {
    args.try_into().map_err(|_| refuse(format!("{} arguments, expected {N}", args.len())))
}

/// Adds the functions called by guarded instructions to an environment.
pub(super) fn install(env: &mut Environment) {
    for (name, expression) in OPERATORS {
        add(env, name, move |_, args| operator(name, expression, args));
    }
    add(env, MADE, |_, args| made(exactly::<1>(args)?[0].clone()));
    add(env, SPLAT, |_, args| {
        let mut items = Vec::new();
        for list in args {
            for item in list.try_iter()? {
                memory(32)?;
                items.push(item);
            }
        }
        Ok(Value::from(items))
    });
    add(env, EACH, |_, args| {
        let [of] = exactly(args)?;
        // The engine counts all characters before it takes the first one.
        work(of.as_str().map_or(0, str::len) as u64 / 64)?;
        Ok(of.clone())
    });
    add(env, ITEM, |_, args| {
        let [of, key] = exactly(args)?;
        work(size(key, 0)? / 8 + of.as_str().map_or(0, str::len) as u64 / 64)?;
        of.get_item(key)
    });
    add(env, SLICE, |_, args| {
        let [of, a, b, c] = exactly(args)?;
        fits(size(of, 0)?.saturating_mul(4))?;
        let operands = [("of", of.clone()), ("a", a.clone()), ("b", b.clone()), ("c", c.clone())];
        made(evaluated("of[a:b:c]", Value::from_pairs(operands))?)
    });
    add(env, FILTER, |state, args| {
        let (args, name) = named(args)?;
        check_growth(name, args)?;
        made(state.apply_filter(name, args).map_err(unknown("filter", name))?)
    });
    add(env, TEST, |state, args| {
        let (args, name) = named(args)?;
        size_of_all(args)?;
        state.perform_test(name, args).map(Value::from).map_err(unknown("test", name))
    });
    add(env, METHOD, |state, args| {
        let (args, name) = named(args)?;
        match args {
            // In the filter, separator and items are in reverse order.
            [at, items] if name == "join" => check_growth(name, &[items.clone(), at.clone()])?,
            _ => check_growth(name, args)?,
        }
        let (of, args) = args.split_first().ok_or_else(|| refuse("a method call without a value"))?;
        made(of.call_method(state, name, args)?)
    });
    add(env, SET, |_, args| {
        let [value, of, name] = exactly(args)?;
        let Some(namespace) = of.downcast_object_ref::<Namespace>() else {
            return Err(refuse(format!(
                "can only assign to attributes of a namespace, not of a {}",
                of.kind()
            )));
        };
        namespace.set(name.as_str().unwrap_or_default(), value.clone())?;
        Ok(Value::UNDEFINED)
    });
    add(env, "namespace", |_, args| {
        let namespace = Namespace::default();
        for values in args {
            for key in values.try_iter()? {
                namespace.set(&key.to_string(), values.get_item(&key)?)?;
            }
        }
        Ok(Value::from_object(namespace))
    });
    add(env, "debug", |_, _| Err(refuse("debug() is not available")));
}

/// Jinja's only mutable value: attributes by name. It cannot contain another namespace, so no value can contain itself.
#[derive(Debug, Default)]
struct Namespace(Mutex<BTreeMap<Arc<str>, Value>>);

impl Namespace {
    fn set(&self, name: &str, value: Value) -> Result<()> {
        size(&value, 1)?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into(), value);
        Ok(())
    }
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let map = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Enumerator::Values(map.keys().map(|key| Value::from(Arc::clone(key))).collect())
    }
}

/// Checks the bounds that must hold before a source is parsed. Parsing and compilation recurse into expressions and multiply
/// constants.
pub(super) fn check_source(source: &str, syntax: &SyntaxConfig) -> Result<()> {
    let (mut in_tag, mut products) = (0, 0);
    for token in tokenize(source, false, syntax.clone()) {
        let (token, span) = token?;
        in_tag += 1;
        match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => in_tag = 0,
            Token::Mul | Token::Pow => products += 1,
            _ => {}
        }
        let what = if in_tag > MAX_TAG_TOKENS {
            format!("a tag of more than {MAX_TAG_TOKENS} tokens")
        } else if products > MAX_PRODUCTS {
            format!("more than {MAX_PRODUCTS} multiplications")
        } else {
            continue;
        };
        return Err(refuse(format!("{what} at line {}", span.start_line)));
    }
    Ok(())
}

/// Returns the same instructions with bounds.
pub(super) fn guarded<'s>(plain: &Instructions<'s>) -> Result<Instructions<'s>> {
    use Instruction as I;
    let mut list: Vec<(u32, Instruction<'s>)> = Vec::new();
    // New start of each instruction; the jumps are adjusted below.
    let mut places = Vec::new();
    let splat = || refuse("*args are only supported in calls of functions and macros");
    let more = |count: &Option<u16>| count.and_then(|count| count.checked_add(1)).ok_or_else(splat);
    let mut index = 0;
    while let Some(instruction) = plain.get(index) {
        places.push(list.len() as u32);
        let call = |name: &'static str, count: u16| I::CallFunction(name, Some(count));
        let named = |name: &str, function: &'static str, count: u16| {
            vec![I::LoadConst(Value::from(name)), I::CallFunction(function, Some(count))]
        };
        let new = match instruction {
            I::Add => vec![call("+", 2)],
            I::StringConcat => vec![call("~", 2)],
            I::Mul => vec![call("*", 2)],
            I::Eq => vec![call("==", 2)],
            I::Ne => vec![call("!=", 2)],
            I::Lt => vec![call("<", 2)],
            I::Lte => vec![call("<=", 2)],
            I::Gt => vec![call(">", 2)],
            I::Gte => vec![call(">=", 2)],
            I::In => vec![call("in", 2)],
            I::GetItem => vec![call(ITEM, 2)],
            I::Slice => vec![call(SLICE, 4)],
            I::ApplyFilter(name, count, _) => named(name, FILTER, more(count)?),
            I::PerformTest(name, count, _) => named(name, TEST, more(count)?),
            I::CallMethod(name, count) => named(name, METHOD, more(count)?),
            I::SetAttr(name) => {
                let mut set = named(name, SET, 3);
                set.push(I::DiscardTop);
                set
            }
            I::PushLoop(_) => vec![call(EACH, 1), instruction.clone()],
            // A single list, charged to the budget, replaces any number of lists.
            I::UnpackLists(count) => {
                vec![call(SPLAT, u16::try_from(*count).map_err(|_| splat())?), I::UnpackLists(1)]
            }
            // The template's own text counts too, because a loop can repeat it.
            I::EmitRaw(text) => vec![I::LoadConst(Value::from_safe_string((*text).to_owned())), I::Emit],
            I::LoadConst(value) => {
                size(value, 0)?;
                vec![instruction.clone()]
            }
            I::CompareAndPreserve(_) => {
                return Err(refuse("chained comparisons are not supported; write `a < b and b < c`"));
            }
            I::BuildList(_)
            | I::BuildTuple(_)
            | I::BuildMap(_)
            | I::EndCapture
            | I::CallFunction(..)
            | I::CallObject(_) => {
                vec![instruction.clone(), call(MADE, 1)]
            }
            _ => vec![instruction.clone()],
        };
        list.extend(new.into_iter().map(|instruction| (index, instruction)));
        index += 1;
    }
    places.push(list.len() as u32);
    let mut out = Instructions::new(plain.name(), plain.source());
    for (old, mut instruction) in list {
        match &mut instruction {
            I::Iterate(to)
            | I::Jump(to)
            | I::JumpIfFalse(to)
            | I::JumpIfFalseOrPop(to)
            | I::JumpIfTrueOrPop(to)
            | I::BuildMacro(_, to, _) => {
                *to = *places.get(*to as usize).ok_or_else(|| refuse("a jump to a missing instruction"))?;
            }
            _ => {}
        }
        match plain.get_line(old) {
            Some(line) => out.add_with_line(instruction, u16::try_from(line).unwrap_or(u16::MAX)),
            None => out.add(instruction),
        };
    }
    Ok(out)
}
