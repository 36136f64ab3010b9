//! Report on a run as one shareable file: `report.html` contains its plots, which are also written as separate SVG files.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::{Cursor, Read as _};
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use image::RgbImage;
use omnigrpo_guard::inside;
use omnigrpo_media::{Limits, load_image};
use omnigrpo_observe::{Warning, is_alias, write_atomic};
use serde_json::{Map, Value};

use crate::Error;
use crate::assets;
use crate::evaluations::{Change, Comparison, Evaluations};
use crate::index::Lines;
use crate::media;
use crate::plot::{self, Line, Plot};
use crate::rollouts::Records;
use crate::run::Run;

/// Number of prompts of the last step that the report shows. Prompts whose completions differ most are preferred.
const SHOWN_PROMPTS: usize = 4;
/// Number of completions shown per prompt, taken from the best and the worst.
const SHOWN_COMPLETIONS: usize = 4;
/// Number of questions shown that improved in the evaluation, and of those that got worse.
const SHOWN_QUESTIONS: usize = 4;
/// Largest number of characters of a text.
const MAX_CHARS: usize = 2_000;
/// Longer side of a picture, in pixels.
const PICTURE_PX: u32 = 320;
/// Largest picture that is scaled down, in pixels. Larger pictures are left out.
const MAX_PIXELS: u64 = 20_000 * 20_000;
/// Largest animation or sound that is embedded unchanged, in bytes.
const MAX_EMBEDDED_BYTES: u64 = 512 << 10;
/// Number of lines shown from the log.
const LOG_LINES: usize = 40;

const STYLE: &str = "body{font:14px/1.5 system-ui,sans-serif;max-width:1100px;margin:0 auto;padding:16px;color:var(--ink);background:var(--card)}\
h1{font-size:22px}h2{font-size:17px;margin:28px 0 8px;border-bottom:1px solid var(--line)}table{border-collapse:collapse;margin:8px 0}\
td,th{padding:2px 10px;border-bottom:1px solid var(--line);text-align:right;vertical-align:top}th:first-child,td.t{text-align:left;overflow-wrap:anywhere}\
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--paper);border:1px solid var(--line);border-radius:6px;padding:6px 8px;margin:4px 0}\
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:10px}.plots img{width:100%}\
.card{border:1px solid var(--line);border-radius:8px;padding:8px 12px;margin:10px 0}.sides{display:grid;grid-template-columns:repeat(auto-fit,minmax(280px,1fr));gap:10px}\
.q{color:var(--quiet)}.good{color:var(--good)}.bad{color:var(--bad)}.warning{border-left:4px solid var(--warm)}.plots img{background:#fff;border-radius:6px}.card img{max-width:320px;max-height:240px;margin:4px 8px 4px 0}\
@media print{.card,.plots img{break-inside:avoid}}";

/// Numbers of a step by name.
type Row = BTreeMap<String, f64>;

/// Report that [`report`] wrote.
#[derive(Debug)]
pub struct Report {
    /// Path of the report.
    pub path: PathBuf,
    /// Directories outside of the run directory from which media are embedded. Records name media by path and may name any file
    /// on
    /// this machine, so the user should check these directories before sharing a report.
    pub media_folders: BTreeSet<PathBuf>,
}

/// Writes `report.html` and `plots/*.svg` into a run directory.
///
/// # Errors
/// Returns an error if the directory contains no run or cannot be written.
pub fn report(directory: &Path) -> Result<Report, Error> {
    let run = Run::find(&[directory.to_owned()])?.remove(0);
    let (rows, evaluations) = metrics(&run)?;
    let plots = plots(&rows, &evaluations);
    let folder = run.dir.join("plots");
    let made = std::fs::create_dir_all(&folder).and_then(|()| inside::resolve(&run.dir, "plots"));
    let folder = made.map_err(Error::io("make the directory", &folder))?;
    let written = |path: &Path, text: &str| {
        write_atomic(path, |out| out.write_all(text.as_bytes())).map_err(Error::from)
    };
    let mut pictures = Vec::new();
    for plot in &plots {
        let svg = plot.svg();
        written(&folder.join(format!("{}.svg", plot.file_name())), &svg)?;
        pictures.push((plot.title.clone(), svg));
    }
    let path = run.dir.join("report.html");
    let mut media_folders = BTreeSet::new();
    written(&path, &page(&run, &rows, &pictures, &mut media_folders)?)?;
    media_folders.retain(|folder| !folder.starts_with(&run.dir));
    Ok(Report { path, media_folders })
}

/// Draws the most informative curves of a run as one SVG; `None` if the run has no step.
#[must_use]
pub fn curves(directory: &Path) -> Option<String> {
    const SHOWN: [&str; 6] = ["Reward", "Evaluation", "Loss", "KL", "Entropy", "Completion length"];
    let run = Run::find(&[directory.to_owned()]).ok()?.remove(0);
    let (rows, evaluations) = metrics(&run).ok()?;
    let plots = plots(&rows, &evaluations);
    let shown: Vec<&Plot> =
        SHOWN.iter().filter_map(|title| plots.iter().find(|plot| plot.title == *title)).take(4).collect();
    plot::grid(&shown)
}

/// Returns the rows of steps and the rows of evaluations. If a step was written twice, the later row counts.
fn metrics(run: &Run) -> Result<(Vec<Row>, Vec<Row>), Error> {
    let path = run.dir.join("metrics.jsonl");
    let mut lines = Lines::new(run.open(&path)?);
    let (mut rows, mut evaluations) = (Vec::<Row>::new(), Vec::<Row>::new());
    while let Some((_, line)) = lines.next().map_err(Error::io("read", &path))? {
        let Ok(all) = serde_json::from_slice::<Map<String, Value>>(line) else { continue };
        let row: Row = all.iter().filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect();
        let Some(&step) = row.get("step") else { continue };
        let kept =
            if all.keys().any(|name| name.starts_with("eval_")) { &mut evaluations } else { &mut rows };
        while kept.last().is_some_and(|own| own["step"] >= step) {
            kept.pop();
        }
        kept.push(row);
    }
    Ok((rows, evaluations))
}

fn plots(rows: &[Row], evaluations: &[Row]) -> Vec<Plot> {
    let line = |rows: &[Row], name: &str, label: &str| {
        let points = rows.iter().filter_map(|row| Some((*row.get("step")?, *row.get(name)?)));
        Line { label: label.to_owned(), points: points.collect() }
    };
    let one = |title: &str, names: &[(&str, &str)]| {
        let lines = names.iter().map(|(name, label)| line(rows, name, label));
        Plot { title: title.to_owned(), lines: lines.filter(|line| !line.points.is_empty()).collect() }
    };
    let named = |strip: fn(&str) -> Option<&str>| -> Vec<(&str, &str)> {
        let last = rows.last().into_iter().flat_map(Row::keys);
        last.filter_map(|name| Some((name.as_str(), strip(name)?))).collect()
    };
    let mut plots = vec![
        one("Reward", &[("reward", "reward")]),
        one("Rewards", &named(|name| name.strip_prefix("rewards/")?.strip_suffix("/mean"))),
        one("Groups without variance", &[("frac_reward_zero_std", "share")]),
        one("KL", &[("kl", "kl")]),
        one("Entropy", &[("entropy", "entropy")]),
        one("Loss", &[("loss", "loss")]),
        one("Gradient norm", &[("grad_norm", "norm")]),
        one(
            "Clip ratio",
            &[
                ("clip_ratio/region_mean", "all"),
                ("clip_ratio/low_mean", "low"),
                ("clip_ratio/high_mean", "high"),
            ],
        ),
        one("Completion length", &[("completions/mean_length", "mean"), ("completions/max_length", "max")]),
        one(
            "Rollout and training",
            &[
                ("sampling/sampling_logp_difference/mean", "mean"),
                ("sampling/sampling_logp_difference/max", "max"),
            ],
        ),
        one("Seconds by phase", &named(|name| name.strip_prefix("time/"))),
        one("Memory MB", &[("memory/peak_mb", "peak"), ("memory/media_store_mb", "media kept")]),
    ];
    let held_out =
        ["eval_accuracy", "eval_reward"].map(|name| line(evaluations, name, &name["eval_".len()..]));
    plots.push(Plot {
        title: "Evaluation".to_owned(),
        lines: held_out.into_iter().filter(|line| line.points.len() > 1).collect(),
    });
    plots.retain(|plot| !plot.lines.is_empty());
    plots
}

fn page(
    run: &Run,
    rows: &[Row],
    plots: &[(String, String)],
    folders: &mut BTreeSet<PathBuf>,
) -> Result<String, Error> {
    let mut out = String::new();
    let name = escaped(&run.name());
    let last = rows.last().and_then(|row| row.get("step")).copied().unwrap_or(0.0);
    let seconds: f64 = rows.iter().filter_map(|row| row.get("step_time")).sum();
    // Writing to a string cannot fail.
    let _ = write!(
        out,
        "<!doctype html><html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'\">\
         <title>{name}</title><style>{}{STYLE}</style></head><body><header><h1>{name}</h1><p class=\"q\">{last} steps in {:.1} min of training</p></header><main>",
        assets::COLOURS,
        seconds / 60.0
    );
    warnings(&mut out, run)?;
    section(&mut out, "Curves", |out| {
        out.push_str("<div class=\"plots\">");
        for (title, svg) in plots {
            let (title, data) = (escaped(title), STANDARD.encode(svg));
            let _ = write!(out, "<img alt=\"{title}\" src=\"data:image/svg+xml;base64,{data}\">");
        }
        out.push_str("</div>");
    });
    evaluation(&mut out, run, folders)?;
    samples(&mut out, run, folders)?;
    section(&mut out, "Time", |out| timing(out, rows));
    section(&mut out, "Settings", |out| {
        out.push_str("<table>");
        for setting in run.settings() {
            let cells = [&setting.name, &setting.value, &setting.origin].map(|text| escaped(text));
            let [name, value, origin] = cells;
            let _ = write!(
                out,
                "<tr><th>{name}</th><td class=\"t\">{value}</td><td class=\"t q\">{origin}</td></tr>"
            );
        }
        out.push_str("</table>");
    });
    section(&mut out, "Log of the run", |out| {
        let _ = write!(out, "<pre>{}</pre>", escaped(&log(run)));
    });
    out.push_str("</main></body></html>\n");
    Ok(out)
}

/// Writes the problems that the run reported and how long they lasted.
fn warnings(out: &mut String, run: &Run) -> Result<(), Error> {
    let rows = run.warnings()?;
    let told: Vec<Warning> =
        rows.split(|&byte| byte == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    section(out, "Training problems", |out| {
        for (at, own) in told.iter().enumerate().filter(|(_, own)| own.begins) {
            let end = told[at..].iter().find(|other| !other.begins && other.rule == own.rule);
            let end = end
                .map_or("It lasted to the end.".to_owned(), |end| format!("It ended at step {}.", end.step));
            let _ = write!(out, "<p class=\"card warning\">{}. {end}</p>", escaped(&own.text));
        }
    });
    Ok(())
}

fn section(out: &mut String, title: &str, fill: impl FnOnce(&mut String)) {
    let before = out.len();
    let _ = write!(out, "<h2>{title}</h2>");
    let begun = out.len();
    fill(out);
    if out.len() == begun {
        out.truncate(before);
    }
}

fn evaluation(out: &mut String, run: &Run, folders: &mut BTreeSet<PathBuf>) -> Result<(), Error> {
    let all = Evaluations::summaries(run)?;
    let all = all.as_array().map(Vec::as_slice).unwrap_or_default();
    let (Some(first), Some(last)) = (all.first(), all.last()) else { return Ok(()) };
    let step = |one: &Value| one["step"].as_u64().unwrap_or(0);
    let _ = write!(out, "<h2>Evaluation</h2><table><tr><th></th>");
    for one in all {
        let _ = write!(out, "<th>step {}</th>", step(one));
    }
    out.push_str("</tr>");
    let empty = Map::new();
    for name in last["summary"].as_object().unwrap_or(&empty).keys() {
        // The mean under the name of a reward can be the same number.
        let plain = name.strip_prefix("eval_rewards/").and_then(|name| name.strip_suffix("/mean"));
        let repeats = plain.is_some_and(|plain| {
            let plain = format!("eval_{plain}");
            all.iter().all(|one| one["summary"][&plain] == one["summary"][name])
        });
        if !last["summary"][name].is_number() || is_alias(name) || repeats {
            continue;
        }
        let _ = write!(out, "<tr><th>{}</th>", escaped(name.trim_start_matches("eval_")));
        for one in all {
            let _ = write!(out, "<td>{}</td>", number(&one["summary"][name]));
        }
        out.push_str("</tr>");
    }
    out.push_str("</table>");
    let categories = |one: &Value| one["summary"]["categories"].as_array().cloned().unwrap_or_default();
    let (before, after) = (categories(first), categories(last));
    if !after.is_empty() {
        out.push_str(
            "<table><tr><th>category</th><th>rows</th><th>right before</th><th>right after</th></tr>",
        );
        for own in &after {
            let earlier = before.iter().find(|other| other["category"] == own["category"]);
            let _ = write!(
                out,
                "<tr><th>{}</th><td>{}</td><td>{}</td><td>{}</td></tr>",
                escaped(own["category"].as_str().unwrap_or_default()),
                own["rows"],
                earlier.map_or("–".to_owned(), |own| number(&own["accuracy"])),
                number(&own["accuracy"]),
            );
        }
        out.push_str("</table>");
    }
    if step(first) == step(last) {
        return Ok(());
    }
    let evaluations = Evaluations::default();
    for (title, change) in [("Got better", Change::Better), ("Got worse", Change::Worse)] {
        let asked = Comparison::of(step(first), step(last), change, SHOWN_QUESTIONS);
        let found = evaluations.compare(run, run, &asked)?;
        let rows = found["rows"].as_array().map(Vec::as_slice).unwrap_or_default();
        if rows.is_empty() {
            continue;
        }
        let _ = write!(out, "<h3>{title}: {} questions</h3>", found["all"]);
        for row in rows {
            out.push_str("<div class=\"card\">");
            let at = row["row"].as_u64().unwrap_or(0) as usize;
            let open = |place| evaluations.medium(run, step(last), at, place);
            embed(out, row["media"].as_array(), open, folders);
            let _ = write!(
                out,
                "<pre>{}</pre><p class=\"q\">truth {}</p><div class=\"sides\">",
                text(&row["prompt"]),
                text(&row["solution"])
            );
            for side in ["before", "after"] {
                let _ =
                    write!(out, "<div><b>{side}</b><pre>{}</pre></div>", text(&row[side]["completions"][0]));
            }
            out.push_str("</div></div>");
        }
    }
    Ok(())
}

/// Writes prompts of the last step with their completions.
fn samples(out: &mut String, run: &Run, folders: &mut BTreeSet<PathBuf>) -> Result<(), Error> {
    let Some(step) = run.steps("rollouts")?.pop() else { return Ok(()) };
    let records = Records::default();
    let found = records.groups(run, step, 0, 500)?;
    let spread = |group: &Value| {
        let rewards: Vec<f64> =
            group["reward"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        let most = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let least = rewards.iter().copied().fold(f64::INFINITY, f64::min);
        if rewards.is_empty() { 0.0 } else { most - least }
    };
    let mut groups: Vec<&Value> = found["groups"].as_array().into_iter().flatten().collect();
    groups.sort_by(|a, b| spread(b).total_cmp(&spread(a)));
    let _ = write!(out, "<h2>Completions of step {step}</h2>");
    for group in groups.into_iter().take(SHOWN_PROMPTS) {
        let at = group["group"].as_u64().unwrap_or(0) as usize;
        let shown = records.group(run, step, at)?;
        out.push_str("<div class=\"card\">");
        embed(out, shown["media"].as_array(), |place| records.medium(run, step, at, place), folders);
        let _ = write!(
            out,
            "<pre>{}</pre><p class=\"q\">{} · truth {}</p><div class=\"sides\">",
            text(&shown["prompt"]["text"]),
            text(&shown["id"]),
            text(&shown["solution"])
        );
        let mut all: Vec<&Value> = shown["samples"].as_array().into_iter().flatten().collect();
        all.sort_by(|a, b| {
            b["reward"].as_f64().unwrap_or(f64::MIN).total_cmp(&a["reward"].as_f64().unwrap_or(f64::MIN))
        });
        let ends = |place: usize| place < SHOWN_COMPLETIONS / 2 || place + SHOWN_COMPLETIONS / 2 >= all.len();
        for (_, own) in all.iter().enumerate().filter(|(place, _)| ends(*place)) {
            let advantage = own["advantage"].as_f64().unwrap_or(0.0);
            let _ = write!(
                out,
                "<div><b>{}</b> <span class=\"{}\">A {advantage:+.2}</span> <span class=\"q\">{}</span><pre>{}</pre></div>",
                number(&own["reward"]),
                match advantage {
                    a if a < 0.0 => "bad",
                    a if a > 0.0 => "good",
                    _ => "q",
                },
                escaped(&own["rewards"].as_object().map_or(String::new(), |all| {
                    all.iter()
                        .map(|(name, value)| format!("{name} {}", number(value)))
                        .collect::<Vec<_>>()
                        .join(", ")
                })),
                text(&own["completion"]["text"]),
            );
        }
        out.push_str("</div></div>");
    }
    Ok(())
}

/// Embeds pictures, small animations and sounds in the report and names those that are left out. Adds the directories of embedded
/// files to `folders`.
fn embed(
    out: &mut String,
    listed: Option<&Vec<Value>>,
    open: impl Fn(usize) -> Result<media::Medium, Error>,
    folders: &mut BTreeSet<PathBuf>,
) {
    for (place, own) in listed.into_iter().flatten().enumerate() {
        let name = text(&own["name"]);
        let data = open(place).ok().and_then(|medium| {
            let data = data_address(&medium)?;
            folders.extend(medium.path.parent().map(Path::to_owned));
            Some(data)
        });
        let _ = match data {
            Some(data) if data.starts_with("data:image/") => {
                write!(out, "<img alt=\"{name}\" src=\"{data}\">")
            }
            Some(data) => write!(out, "<audio controls src=\"{data}\"></audio>"),
            None => write!(out, "<p class=\"q\">{name} (not in this file)</p>"),
        };
    }
}

fn data_address(medium: &media::Medium) -> Option<String> {
    let small = std::fs::metadata(&medium.path).ok()?.len() <= MAX_EMBEDDED_BYTES;
    let is_still =
        ["image/png", "image/jpeg", "image/webp", "image/bmp", "image/tiff"].contains(&medium.mime);
    let (kind, bytes) = if is_still {
        let limits = Limits { max_pixels: MAX_PIXELS, ..Limits::default() };
        let picture = load_image(&medium.path, &limits).ok()?;
        let picture = RgbImage::from_raw(picture.width_px, picture.height_px, picture.pixels)?;
        let (width, height) = picture.dimensions();
        let scale = f64::from(PICTURE_PX) / f64::from(width.max(height));
        let scaled = |side: u32| ((f64::from(side) * scale).round() as u32).max(1);
        let picture = match scale < 1.0 {
            true => image::imageops::thumbnail(&picture, scaled(width), scaled(height)),
            false => picture,
        };
        let mut png = Cursor::new(Vec::new());
        picture.write_to(&mut png, image::ImageFormat::Png).ok()?;
        ("image/png", png.into_inner())
    } else if small && (medium.mime == "image/gif" || medium.mime.starts_with("audio/")) {
        (medium.mime, std::fs::read(&medium.path).ok()?)
    } else {
        return None;
    };
    Some(format!("data:{kind};base64,{}", STANDARD.encode(bytes)))
}

fn timing(out: &mut String, rows: &[Row]) {
    let mean = |name: &str| {
        let all: Vec<f64> = rows.iter().filter_map(|row| row.get(name)).copied().collect();
        (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
    };
    let Some(step) = mean("step_time") else { return };
    out.push_str("<table><tr><th>phase</th><th>s/step</th><th>share</th></tr>");
    let names = rows.last().into_iter().flat_map(Row::keys).filter(|name| name.starts_with("time/"));
    for (name, secs) in names.filter_map(|name| Some((&name["time/".len()..], mean(name)?))) {
        let share = 100.0 * secs / step.max(1e-9);
        let _ = write!(out, "<tr><th>{}</th><td>{secs:.3}</td><td>{share:.0} %</td></tr>", escaped(name));
    }
    let _ = write!(out, "<tr><th>step</th><td>{step:.3}</td><td></td></tr></table>");
}

/// Returns the beginning of the log, in which the run describes its environment.
fn log(run: &Run) -> String {
    let mut text = Vec::new();
    let Ok(file) = run.open(&run.dir.join("log.txt")) else { return String::new() };
    if file.take(1 << 18).read_to_end(&mut text).is_err() {
        return String::new();
    }
    String::from_utf8_lossy(&text).lines().take(LOG_LINES).collect::<Vec<_>>().join("\n")
}

fn number(value: &Value) -> String {
    value.as_f64().map_or("–".to_owned(), |value| {
        let text = format!("{value:.4}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    })
}

/// Formats a text or value of a record, shortened and escaped for HTML.
fn text(value: &Value) -> String {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Null => "none".to_owned(),
        other => other.to_string(),
    };
    let cut: String = text.chars().take(MAX_CHARS).collect();
    let more = if cut.len() < text.len() { "…" } else { "" };
    format!("{}{more}", escaped(&cut))
}

/// Escapes text for HTML and makes invisible characters visible.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in omnigrpo_observe::escape(text).chars() {
        match c {
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '&' => out.push_str("&amp;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_is_one_file_and_text_in_it_is_no_markup() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(directory.path()).unwrap();
        let row = |step: f64| {
            format!(
                "{{\"step\":{step},\"reward\":{},\"kl\":null,\"step_time\":2,\"time/rollout\":1.5}}\n",
                step / 4.0
            )
        };
        let other = "null\n[1]\n{\"reward\":7}\n{\"step\":\"x\"}\n";
        std::fs::write(root.join("metrics.jsonl"), [1.0, 2.0, 3.0, 2.0].map(row).concat() + other).unwrap();
        std::fs::write(root.join("config.yaml"), "run_name: <i>mine</i>   # flag\nseed: 7   # default\n")
            .unwrap();
        let warning = |step: u64, begins: bool| {
            let text = "<b>cut</b> off".into();
            let own = Warning { step, rule: "cut_off".into(), begins, since: 1, text };
            format!("{}\n", serde_json::to_string(&own).unwrap())
        };
        std::fs::write(
            root.join("warnings.jsonl"),
            [warning(5, true), warning(9, false), warning(12, true)].concat(),
        )
        .unwrap();
        std::fs::create_dir(root.join("rollouts")).unwrap();
        image::RgbImage::from_pixel(640, 4, image::Rgb([255, 0, 0])).save(root.join("wide.png")).unwrap();
        let rollout = serde_json::json!({
            "step": 2, "timestamp": "", "epoch": 0.5, "id": "r", "group": 0, "sample": 0, "prompt": "<script>alert(1)</script>",
            "completion": "</pre><img src=x onerror=alert(1)>\u{202e}", "solution": null, "rewards": {"accuracy": 1}, "reward": 1.0,
            "advantage": -0.5, "length": 3, "media": [root.join("wide.png"), "/etc/passwd"], "finish_reason": "stop",
        });
        std::fs::write(root.join("rollouts/step-000002.jsonl"), format!("{rollout}\n")).unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let foreign = std::fs::canonicalize(elsewhere.path()).unwrap();
        let Report { path, media_folders } = report(&root).unwrap();
        assert!(media_folders.is_empty(), "{media_folders:?}");
        let page = std::fs::read_to_string(&path).unwrap();
        assert_eq!(path, root.join("report.html"));
        assert!(page.contains("<title>&lt;i&gt;mine&lt;/i&gt;</title>"));
        assert!(page.contains("&lt;/pre&gt;&lt;img src=x onerror=alert(1)&gt;\\u{202e}"));
        assert!(!page.contains("<script") && !page.contains("<img src=x") && !page.contains("http://"));
        assert!(page.contains("&lt;b&gt;cut&lt;/b&gt; off. It ended at step 9.</p>"));
        assert!(page.contains("&lt;b&gt;cut&lt;/b&gt; off. It lasted to the end.</p>"));
        assert!(page.contains("<main>") && page.contains("--good: #"));
        assert!(page.contains("2 steps in 0.1 min"), "a step that was done again counts once");
        assert!(
            page.contains("A -0.50")
                && page.contains("<th>seed</th>")
                && page.contains("<th>rollout</th><td>1.500</td><td>75 %</td>")
        );
        let picture = page.split("src=\"data:image/png;base64,").nth(1).unwrap().split('"').next().unwrap();
        let picture = image::load_from_memory(&STANDARD.decode(picture).unwrap()).unwrap();
        assert_eq!((picture.width(), picture.height()), (320, 2));
        assert!(page.contains("passwd (not in this file)"));
        let mut plots: Vec<_> =
            std::fs::read_dir(root.join("plots")).unwrap().map(|e| e.unwrap().file_name()).collect();
        plots.sort();
        assert_eq!(plots, ["reward.svg", "seconds-by-phase.svg"], "what was not measured has no plot");
        let svg = std::fs::read_to_string(root.join("plots/reward.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains("polyline"), "{svg}");
        assert_eq!(page.matches("data:image/svg+xml;base64,").count(), 2);
        // Directories outside of the run directory are returned if the report embeds media from them.
        std::fs::copy(root.join("wide.png"), foreign.join("theirs.png")).unwrap();
        let mut rollout = rollout;
        rollout["media"] =
            serde_json::json!([root.join("wide.png"), foreign.join("theirs.png"), "/etc/passwd"]);
        std::fs::write(root.join("rollouts/step-000002.jsonl"), format!("{rollout}\n")).unwrap();
        assert_eq!(report(&root).unwrap().media_folders, BTreeSet::from([foreign.clone()]));
        // Plots are written into the run directory and never through a link.
        #[cfg(unix)]
        {
            std::fs::remove_dir_all(root.join("plots")).unwrap();
            std::os::unix::fs::symlink(&foreign, root.join("plots")).unwrap();
            assert!(omnigrpo_guard::told(&report(&root).unwrap_err()).contains("which is outside of"));
            assert!(!foreign.join("reward.svg").exists());
        }
    }
}
