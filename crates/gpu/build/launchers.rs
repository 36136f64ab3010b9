//! Generates a Rust function for each kernel, from the kernel's own signature in `cuda/`.
//!
//! A function takes the parameters of its kernel and returns the kernel with its arguments:
//!
//! | CUDA | Rust |
//! |---|---|
//! | `Array` | an [`Element`], which may be absent: an array of either dtype, from this element on |
//! | `T*` | the same; the array must be bf16 if `T` has 2 bytes, and otherwise f32 or words |
//! | `int`, `u32` | `usize`; a launch refuses a value that does not fit |
//! | `i64` | `usize` |
//! | `u64`, `float` | `u64`, `f32` |
//! | a structure | a structure with these fields; a field `none` fills a gap |
//!
//! A `STEP_KERNEL` may start while the kernels before it run ([`Kernel::starts_early`]). Without a call of `wait_previous`, in it or
//! in a function of its file that it calls, it is refused.
//!
//! Kernels `name_1`, `name_2`, … with the same parameters share the function `name`, which takes the number first. `NAME` lists
//! the numbers.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

type Result<T> = std::result::Result<T, String>;

/// Type and name of a parameter or field.
type Named = (String, String);
/// Structures by name, with their fields.
type Structures = BTreeMap<String, Vec<Named>>;

#[derive(Clone)]
struct Kernel {
    name: String,
    /// Lines of the comment above the kernel.
    comment: Vec<String>,
    parameters: Vec<Named>,
    /// True if the kernel may start while the kernels before it run.
    early: bool,
}

/// Returns Rust source with a module of launchers for each file in `folder`.
pub fn generate(folder: &Path) -> Result<String> {
    let entries = fs::read_dir(folder).map_err(|error| error.to_string())?;
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let (mut structures, mut files) = (Structures::new(), Vec::new());
    let is = |path: &Path, wanted: &str| path.extension().is_some_and(|extension| extension == wanted);
    for path in paths.iter().filter(|path| is(path, "cu") || is(path, "cuh")) {
        let in_file = |why: String| format!("{}: {why}", path.display());
        let text = fs::read_to_string(path).map_err(|error| in_file(error.to_string()))?;
        find_structures(&text, &mut structures).map_err(in_file)?;
        if is(path, "cu") {
            let file = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            files.push((file, expanded(&text).and_then(|text| kernels(&text)).map_err(in_file)?));
        }
    }
    let mut out = String::new();
    let parameters = || files.iter().flat_map(|(_, kernels)| kernels).flat_map(|kernel| &kernel.parameters);
    for (name, fields) in structures.iter().filter(|(name, _)| parameters().any(|(kind, _)| kind == *name)) {
        structure(&mut out, name, fields)?;
    }
    for (file, kernels) in files {
        let _ = writeln!(out, "/// Kernels of `{file}.cu`.\npub mod {file} {{\n    use super::*;");
        for (kernel, numbers) in grouped(kernels) {
            launcher(&mut out, &file, &kernel, &numbers, &structures)?;
        }
        out.push_str("}\n");
    }
    Ok(out)
}

/// Divides a text into words of letters, digits and underscores, `##`, and single characters.
fn tokens(text: &str) -> Vec<&str> {
    let (mut out, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(rest.len());
        let len = if word > 0 {
            word
        } else if rest.starts_with("##") {
            2
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(len);
        out.push(token);
        rest = after;
    }
    out
}

/// Maximum number of uses of one macro in a line, with those in the bodies of others.
const MOST_USES: usize = 100;

/// Replaces uses of macros with parameters by the macros' bodies.
fn expanded(text: &str) -> Result<String> {
    let text = text.replace("\\\n", " ");
    let (defined, rest): (Vec<&str>, Vec<&str>) = text.lines().partition(|line| line.starts_with("#define "));
    let macros: Vec<(&str, Vec<String>, &str)> = defined
        .into_iter()
        .filter_map(|line| {
            let rest = line.strip_prefix("#define ")?;
            let (name, _) = rest.split_once('(')?;
            let (_, parameters, body) = call(rest, name)?;
            Some((name, parameters, body))
        })
        .collect();
    let mut out = String::new();
    for line in rest {
        let mut line = line.to_owned();
        // A macro is defined after those that its body uses.
        for (name, parameters, body) in macros.iter().rev() {
            let mut uses = 0;
            while let Some((before, arguments, after)) = call(&line, name) {
                uses += 1;
                if uses > MOST_USES {
                    return Err(format!("the macro {name} uses itself"));
                }
                let value = |token| {
                    let at = parameters.iter().position(|parameter| parameter == token);
                    at.and_then(|at| arguments.get(at)).map_or(token, String::as_str)
                };
                let own: String =
                    tokens(body).into_iter().filter(|token| *token != "##").map(value).collect();
                line = format!("{before}{own}{after}");
            }
        }
        out = out + &line + "\n";
    }
    Ok(out)
}

/// Finds `name(…)`. Returns the text before it, its arguments and the text after it, or `None` if it does not end.
fn call<'a>(text: &'a str, name: &str) -> Option<(&'a str, Vec<String>, &'a str)> {
    let all = tokens(text);
    let at = all.windows(2).position(|pair| pair == [name, "("])?;
    let (mut depth, mut arguments, mut end) = (0, vec![String::new()], at + 1);
    for token in &all[at + 1..] {
        end += 1;
        depth += i32::from(*token == "(") - i32::from(*token == ")");
        match (*token, depth) {
            (")", 0) => {
                let bytes = |tokens: &[&str]| tokens.iter().map(|token| token.len()).sum::<usize>();
                let arguments = arguments.iter().map(|argument| argument.trim().to_owned()).collect();
                return Some((&text[..bytes(&all[..at])], arguments, &text[bytes(&all[..end])..]));
            }
            ("(", 1) => {}
            (",", 1) => arguments.push(String::new()),
            (token, _) => arguments.last_mut()?.push_str(token),
        }
    }
    None
}

/// Names of the macros that declare a kernel. True marks those of decoding steps.
const MACROS: [(&str, bool); 4] =
    [("KERNEL", false), ("KERNEL_OF", false), ("STEP_KERNEL", true), ("STEP_KERNEL_OF", true)];

/// Returns the text between the first brace and the one that closes it.
fn body(text: &str) -> Option<&str> {
    let start = text.find('{')?;
    let mut depth = 0;
    for (at, c) in text[start..].char_indices() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if depth == 0 {
            return Some(&text[start..start + at]);
        }
    }
    None
}

/// Returns true if the body of a function calls `wait_previous`, or a function of the file that does.
fn waits(body_of: &str, text: &str) -> bool {
    let code: String = body_of.lines().filter_map(|line| line.split("//").next()).collect();
    let all = tokens(&code);
    let calls = |name: &str| all.contains(&name);
    let mut functions = text.match_indices("DEVICE void ").filter_map(|(at, head)| {
        let rest = &text[at + head.len()..];
        Some((rest.split_once('(')?.0, body(rest)?))
    });
    // A function is defined before those that call it.
    calls("wait_previous")
        || functions.any(|(name, own)| calls(name) && own.len() != body_of.len() && waits(own, text))
}

fn kernels(text: &str) -> Result<Vec<Kernel>> {
    let (mut found, mut comment) = (Vec::new(), Vec::new());
    for line in text.lines() {
        let mut rest = line;
        loop {
            let declared_by = |(name, early)| call(rest, name).map(|found| (early, found));
            let first =
                MACROS.into_iter().filter_map(declared_by).min_by_key(|(_, (before, ..))| before.len());
            let Some((early, (_, arguments, after))) = first else { break };
            let [.., name, parameters] = &arguments[..] else { return Err(format!("no kernel in: {line}")) };
            let parameters = parameters.trim_matches(['(', ')']).split(',');
            let parameters = parameters.map(|text| declared(text, "")).collect::<Result<_>>()?;
            let at = after.as_ptr() as usize - text.as_ptr() as usize;
            if early && !body(&text[at..]).is_some_and(|body| waits(body, text)) {
                return Err(format!("the kernel {name} starts early, but does not call wait_previous()"));
            }
            found.push(Kernel {
                name: name.clone(),
                comment: std::mem::take(&mut comment),
                parameters,
                early,
            });
            rest = after;
        }
        if MACROS.iter().any(|(name, _)| rest.trim_start().starts_with(name)) {
            return Err(format!("a kernel's parameters end in another line: {line}"));
        }
        match line.strip_prefix("/// ") {
            Some(line) => comment.push(line.to_owned()),
            None => comment.clear(),
        }
    }
    Ok(found)
}

/// Divides a declaration such as `const u32* ids` into type and name. A later name of one declaration has the type of the first.
fn declared(text: &str, first: &str) -> Result<Named> {
    let text = text.trim();
    let at = text.rfind([' ', '*']).map_or(0, |at| at + 1);
    let (kind, name) = (text[..at].replace("const", ""), &text[at..]);
    let kind: String = kind.chars().filter(|c| !c.is_whitespace()).collect();
    let base = first.trim_end_matches('*');
    let kind = if first.is_empty() { kind } else { format!("{base}{kind}") };
    match (kind.is_empty(), name.is_empty()) {
        (false, false) => Ok((kind, name.to_owned())),
        _ => Err(format!("not a declaration: {text}")),
    }
}

/// Adds the structures that are defined in one line.
fn find_structures(text: &str, structures: &mut Structures) -> Result<()> {
    for line in text.lines() {
        let Some((head, body)) = line.strip_prefix("struct ").and_then(|rest| rest.split_once(" { ")) else {
            continue;
        };
        let Some((body, _)) = body.split_once("; };") else { continue };
        let mut fields = Vec::new();
        for declaration in body.split(';').filter(|_| !body.contains('(') && !body.contains('[')) {
            let mut first = String::new();
            for name in declaration.split(',') {
                let field = declared(name, &first)?;
                if first.is_empty() {
                    first = field.0.clone();
                }
                fields.push(field);
            }
        }
        let known = structures.entry(head.to_owned()).or_insert_with(|| fields.clone());
        if *known != fields {
            return Err(format!("another file defines the structure {head} differently"));
        }
    }
    Ok(())
}

fn structure(out: &mut String, name: &str, fields: &[Named]) -> Result<()> {
    if name == "Array" {
        return Ok(());
    }
    let (mut own, mut list, mut words) = (String::new(), String::new(), 0);
    for (kind, field) in fields {
        let (rust, variant) = match kind.as_str() {
            kind if kind.ends_with('*') && words % 2 == 0 => ("Element<'a>", "Pointer"),
            "int" | "u32" => ("usize", "Size"),
            "float" => ("f32", "Float"),
            _ => return Err(format!("the field {field} of {name} has no launcher: {kind}")),
        };
        words += if variant == "Pointer" { 2 } else { 1 };
        if field == "none" {
            list.push_str("Field::Size(0), ");
        } else {
            let _ = write!(own, "pub {field}: {rust}, ");
            let address = if variant == "Pointer" { ".at" } else { "" };
            let _ = write!(list, "Field::{variant}(fields.{field}{address}), ");
        }
    }
    let [on, of] = if own.contains("'a") { ["<'a>", "<'_>"] } else { ["", ""] };
    let _ = write!(
        out,
        "/// The structure `{name}` of the kernels.\n#[derive(Clone, Copy, Debug, Default)]\npub struct {name}{on} {{ {own}}}\n\
         impl From<{name}{of}> for Arg {{\n    fn from(fields: {name}{of}) -> Self {{\n        Self::fields(&[{list}])\n    }}\n}}\n"
    );
    Ok(())
}

/// Joins kernels whose names differ in a number at the end only. Returns their numbers.
fn grouped(kernels: Vec<Kernel>) -> Vec<(Kernel, Vec<String>)> {
    let mut groups: Vec<(Kernel, Vec<String>)> = Vec::new();
    for kernel in kernels {
        let number = kernel.name.rsplit_once('_').filter(|(_, number)| number.parse::<usize>().is_ok());
        let Some((name, number)) = number.map(|(name, number)| (name.to_owned(), number.to_owned())) else {
            groups.push((kernel, Vec::new()));
            continue;
        };
        match groups.iter_mut().find(|(known, _)| known.name == name && known.parameters == kernel.parameters)
        {
            Some((_, numbers)) => numbers.push(number),
            None => groups.push((Kernel { name, ..kernel }, vec![number])),
        }
    }
    groups
}

fn launcher(
    out: &mut String,
    file: &str,
    kernel: &Kernel,
    numbers: &[String],
    structures: &Structures,
) -> Result<()> {
    let Kernel { name, comment, parameters, early } = kernel;
    let (mut takes, mut gives) = (String::new(), String::new());
    for (kind, parameter) in parameters {
        let (rust, argument) = match kind.as_str() {
            "Array" => ("impl Into<Element<'a>>".into(), format!("{parameter}.into().array()")),
            "u16*" | "short*" => ("impl Into<Element<'a>>".into(), pointer(parameter, "Bf16")),
            kind if kind.ends_with('*') => ("impl Into<Element<'a>>".into(), pointer(parameter, "F32")),
            "int" | "u32" => ("usize".into(), format!("Arg::Size({parameter})")),
            "i64" => ("usize".into(), format!("Arg::Long({parameter} as i64)")),
            "u64" => ("u64".into(), format!("Arg::Word({parameter})")),
            "float" => ("f32".into(), format!("Arg::Float({parameter})")),
            kind if structures.contains_key(kind) => {
                let pointers = structures[kind].iter().any(|(kind, _)| kind.ends_with('*'));
                let lifetime = if pointers { "<'a>" } else { "" };
                (format!("{kind}{lifetime}"), format!("{parameter}.into()"))
            }
            _ => {
                return Err(format!(
                    "{file}.cu: the parameter {parameter} of {name} has no launcher: {kind}"
                ));
            }
        };
        let _ = write!(takes, "{parameter}: {rust}, ");
        let _ = write!(gives, "{argument}, ");
    }
    let full = if numbers.is_empty() {
        format!("\"{file}/{name}\"")
    } else {
        let list = numbers.join(", ");
        let _ = writeln!(out, "    pub const {}: &[usize] = &[{list}];", name.to_uppercase());
        let arms: String =
            numbers.iter().map(|number| format!("{number} => \"{file}/{name}_{number}\", ")).collect();
        takes = format!("number: usize, {takes}");
        // There is no kernel of this name, which the launch reports.
        format!("match number {{ {arms}_ => \"{file}/{name}_?\" }}")
    };
    for line in comment {
        let _ = writeln!(out, "    /// {line}");
    }
    let _ = writeln!(
        out,
        "    pub fn {name}<'a>({takes}) -> Kernel<'a> {{\n        Kernel::new({full}, {early}, vec![{gives}])\n    }}"
    );
    Ok(())
}

fn pointer(parameter: &str, dtype: &str) -> String {
    format!("{parameter}.into().pointer(\"{parameter}\", Dtype::{dtype})")
}
