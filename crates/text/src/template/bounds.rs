//! Bounds on the run of a template: depth of values, work and memory.
//!
//! The engine's fuel is the budget: an instruction, a visited value and 64 bytes of text cost one each, and operators, filters and
//! methods ask for it before they create something large. The functions here, which [`rewrite`](super::rewrite) puts around
//! expressions, charge for what the engine does not see: the items of a list inside a list, and lists that are computed when they
//! are read. They also limit the depth of values, because the engine recurses into them.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use minijinja::value::{Enumerator, Kwargs, Object, Rest, StringInput, ValueKind, ValueOrKwargs, from_args};
use minijinja::{AutoEscape, Environment, Error, State, Value, filters};
use minijinja_contrib::pycompat;

use super::{invalid, rewrite};

type Result<T> = std::result::Result<T, Error>;

/// Budget of a render, more than a conversation of a thousand turns needs: 256 MiB of text.
const RENDER_FUEL: u64 = 1 << 22;
/// Budget of a trial with a conversation of a few words.
const TRIAL_FUEL: u64 = 1 << 18;
const MAX_DEPTH: usize = 100;

/// Size of the budget of a run.
#[derive(Clone, Copy)]
pub(super) enum Budget {
    Render,
    Trial,
}

/// Returns the environment for each [`Budget`].
pub(super) fn by_budget(env: &Environment<'static>) -> [Environment<'static>; 2] {
    [RENDER_FUEL, TRIAL_FUEL].map(|fuel| {
        let mut env = env.clone();
        env.set_fuel(Some(fuel)); // the engine's own recursion limit holds too
        env
    })
}

/// Adds the functions with the bounds to an environment.
pub(super) fn install(env: &mut Environment<'_>) {
    env.set_unknown_method_callback(method);
    env.add_function(rewrite::VALUE, bounded);
    env.add_function(rewrite::TEXT, |value: Value| value); // the engine charges for text that a function returns
    env.add_function(rewrite::ITEMS, |state: &State, value: Value| {
        let mut items = Vec::new();
        for item in value.try_iter()? {
            state.consume_fuel(1)?;
            items.push(item);
        }
        Ok::<_, Error>(Value::from(items))
    });
    env.add_function(rewrite::SET, |state: &State, of: Value, name: &str, value: Value| {
        let Some(namespace) = of.downcast_object_ref::<Namespace>() else {
            return Err(invalid(format!("can only assign to namespaces, not {}", of.kind())));
        };
        namespace.set(state, name, value)
    });
    env.add_function("namespace", |state: &State, dicts: Rest<Value>, attributes: Kwargs| {
        let namespace = Namespace::default();
        for dict in dicts.iter() {
            for key in dict.try_iter()? {
                namespace.set(state, &key.to_string(), dict.get_item(&key)?)?;
            }
        }
        for name in attributes.args() {
            namespace.set(state, name, attributes.get(name)?)?;
        }
        Ok::<_, Error>(Value::from_object(namespace))
    });
    env.remove_global("debug");
    add_filters(env);
}

fn add_filters(env: &mut Environment<'_>) {
    env.add_filter("trim", |state: &State, text: StringInput<'_>, set: Option<Cow<'_, str>>| {
        state.consume_fuel(stripped(text.as_str(), set.as_deref().unwrap_or_default()))?;
        Ok::<_, Error>(filters::trim(text, set))
    });
    env.add_filter("indent", |state: &State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        let (text, width, first, blank, named): (
            StringInput<'_>,
            Option<u64>,
            Option<bool>,
            Option<bool>,
            Kwargs,
        ) = from_args(&args)?;
        let lines = text.as_str().lines().count() as u64 + 1;
        let spaces = width.or(named.get("width")?).unwrap_or(4);
        // The spaces are created even if none of them remains in the result.
        state.consume_fuel(lines.saturating_mul(spaces) / 64)?;
        filters::indent(text, width.map(|width| width as usize), first, blank, named)
    });
    env.add_filter("format", |state: &mut State, format: &Value, args: Rest<ValueOrKwargs>| {
        let text = format.as_str().unwrap_or_default();
        state.consume_fuel(fields(text, '%', args.iter().map(|arg| arg.clone().into())))?;
        filters::format(state, format, args)
    });
    env.add_filter("split", |state: &State, text: &Value, at: Option<Arc<str>>, most: Option<i64>| {
        state.consume_fuel(pieces(text.as_str().unwrap_or_default(), at.as_deref()))?;
        filters::split(text, at, most)
    });
    env.add_filter("lines", |state: &State, text: &Value| {
        state.consume_fuel(pieces(text.as_str().unwrap_or_default(), None))?;
        filters::lines(text)
    });
    env.add_filter("min", |state: &State, items: Value, named: Kwargs| {
        state.consume_fuel(comparisons(&items))?;
        filters::min(state, items, named)
    });
    env.add_filter("max", |state: &State, items: Value, named: Kwargs| {
        state.consume_fuel(comparisons(&items))?;
        filters::max(state, items, named)
    });
    env.add_filter(
        "sum",
        |state: &State, items: Value, of: Option<&str>, start: Option<Value>, named: Kwargs| {
            let start = start.or(named.get("start")?);
            if let Some(start) = start.as_ref().filter(|start| !start.is_number()) {
                return Err(invalid(format!("sum starts from a {}, expected a number", start.kind())));
            }
            filters::sum(state, items, of, start, named)
        },
    );
}

/// Returns the fuel for the items of a text that is split, which exist before the engine charges for them.
fn pieces(text: &str, at: Option<&str>) -> u64 {
    at.map_or(text.len() / 2, |at| text.matches(at).count()) as u64
}

/// Returns the fuel for a search for the least or largest item: each comparison changes the case of both.
fn comparisons(items: &Value) -> u64 {
    let items = || items.try_iter().into_iter().flatten();
    longest(items()).saturating_mul(items().count() as u64) / 64
}

/// Returns the fuel for the arguments of a format. Each field of its text can write the longest argument, in which an escape has up
/// to six characters.
fn fields(text: &str, sign: char, args: impl Iterator<Item = Value>) -> u64 {
    longest(args).saturating_mul(text.matches(sign).count() as u64) / 10
}

/// Returns the length of the longest value in written form.
fn longest(values: impl Iterator<Item = Value>) -> u64 {
    values.map(|value| value.to_string().len() as u64).max().unwrap_or(0)
}

/// Returns the fuel for a comparison of each character of a text with those of a set.
fn stripped(text: &str, set: &str) -> u64 {
    text.len().saturating_mul(set.len()) as u64 / 64
}

/// Charges a value, which must not nest too deep. A list that is computed when it is read becomes a plain one, so that views of
/// views cannot accumulate.
fn bounded(state: &State, value: Value) -> Result<Value> {
    let lazy = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
        && !value.is_tuple()
        && value.downcast_object_ref::<Vec<Value>>().is_none();
    if !lazy {
        charge(state, &value, 0)?;
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        charge(state, &item, 1)?;
        items.push(item);
    }
    Ok(Value::from(items))
}

/// Charges for each value inside `value`, which is at this depth, and for its text. The engine charges for a text itself.
fn charge(state: &State, value: &Value, depth: usize) -> Result<()> {
    if depth > MAX_DEPTH {
        return Err(invalid(format!("nests values deeper than {MAX_DEPTH}")));
    }
    if let Some(text) = value.as_str() {
        // In the written form of a list, an escape has up to four characters.
        return state.consume_fuel(if depth > 0 { 1 + text.len() as u64 / 16 } else { 0 });
    }
    if depth > 0 && value.downcast_object_ref::<Namespace>().is_some() {
        return Err(invalid("puts a namespace into another value".to_owned()));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                charge(state, &item, depth + 1)?;
            }
        }
        ValueKind::Map => {
            for key in value.try_iter()? {
                charge(state, &key, depth + 1)?;
                charge(state, &value.get_item(&key)?, depth + 1)?;
            }
        }
        _ => {}
    }
    state.consume_fuel(u64::from(depth > 0))
}

/// Charges a value that is about to be written.
pub(super) fn written(value: &Value, state: &State) -> Result<()> {
    if matches!(state.auto_escape(), AutoEscape::None) {
        return charge(state, value, 0);
    }
    // An escape has up to six characters.
    (0..6).try_for_each(|_| charge(state, value, 1))
}

/// Runs a method that Python has and Jinja has not, after a charge for what it does beyond its arguments and its result.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value> {
    if let Some(text) = value.as_str() {
        let first = args.first().and_then(Value::as_str);
        state.consume_fuel(match (name, first) {
            ("strip" | "lstrip" | "rstrip", Some(set)) => stripped(text, set),
            ("split", at) => pieces(text, at),
            ("splitlines", _) => pieces(text, None),
            ("format", _) => widths(text).saturating_add(fields(text, '{', args.iter().cloned())),
            _ => 0,
        })?;
    }
    pycompat::unknown_method_callback(state, value, name, args)
}

/// Returns a bound on the fuel for the widths and precisions of a format, which are in its text.
fn widths(text: &str) -> u64 {
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter(|digits| !digits.is_empty());
    numbers.fold(0u64, |sum, digits| sum.saturating_add(digits.parse().unwrap_or(u64::MAX))) / 64
}

/// Jinja's only mutable value: attributes by name. It cannot contain another namespace, so no value can contain itself.
#[derive(Debug, Default)]
struct Namespace(Mutex<BTreeMap<Arc<str>, Value>>);

impl Namespace {
    fn set(&self, state: &State, name: &str, value: Value) -> Result<()> {
        charge(state, &value, 1)?;
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
