//! Report on a run as one shareable file: the page of the run with its data inside. The plots are also written as SVG files.
//!
//! The report contains the answers that the server would give to the page, and the page reads them instead of asking. It has the
//! charts, the distributions, the groups of the last step whose completions differ most, and the questions of the evaluations that
//! changed most. Pictures are scaled down, and clips are shown by their sampled frames.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use omnigrpo_guard::inside;
use omnigrpo_observe::{names, write_atomic};
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use crate::Error;
use crate::assets;
use crate::media::{Medium, Previews};
use crate::plot::{self, Plot, plots};
use crate::run::Run;
use crate::server::App;

/// The run of a report, as a parameter of a request.
const RUN: (&str, &str) = ("run", "0");
/// Number of groups whose completions the report contains.
const SHOWN_GROUPS: usize = 12;
/// Number of questions in each list of changed questions. The page asks for so many at a time.
const SHOWN_QUESTIONS: usize = 20;
/// Largest number of groups in a table. Longer tables would make the file too large to share.
const MAX_GROUPS: u64 = 20_000;
/// Largest total size of pictures and sounds, in bytes.
const MAX_MEDIA_BYTES: usize = 12 << 20;
/// Largest sound that is embedded, in bytes.
const MAX_SOUND_BYTES: u64 = 512 << 10;
/// Longer side of a picture, in pixels.
const PICTURE_PX: u32 = 320;
/// Largest number of frames of a clip.
const FRAMES: usize = 8;

/// Report that [`report`] wrote.
#[derive(Debug)]
pub struct Report {
    /// Path of the report.
    pub path: PathBuf,
    /// Directories outside of the run directory from which media are embedded. Records name media by path and may name any file
    /// on this machine, so the user should check these directories before sharing a report.
    pub media_folders: BTreeSet<PathBuf>,
}

/// Writes `report.html` and `plots/*.svg` into a run directory, or into each run of a directory of runs.
///
/// # Errors
/// Returns an error if the directory contains no run or cannot be written.
pub fn report(directory: &Path) -> Result<Vec<Report>, Error> {
    Run::find(&[directory.to_owned()])?.into_iter().map(written).collect()
}

fn written(run: Run) -> Result<Report, Error> {
    let folder = run.dir.join(names::PLOTS);
    let made = std::fs::create_dir_all(&folder).and_then(|()| inside::resolve(&run.dir, names::PLOTS));
    let folder = made.map_err(Error::io("make the directory", &folder))?;
    let write = |path: &Path, text: &str| {
        write_atomic(path, |out| out.write_all(text.as_bytes())).map_err(Error::from)
    };
    let path = run.dir.join(names::REPORT);
    let dir = run.dir.clone();
    let mut data = Data::new(run);
    data.fill()?;
    for plot in plots(&data.curves) {
        write(&folder.join(format!("{}.svg", plot.file_name())), &plot.svg())?;
    }
    write(&path, &page(&data.name, &json!({ "answers": data.answers, "media": data.media })))?;
    data.folders.retain(|folder| !folder.starts_with(&dir));
    Ok(Report { path, media_folders: data.folders })
}

/// Draws the most informative curves of a run as one SVG; `None` if the run has no step.
pub fn curves(directory: &Path) -> Option<String> {
    const SHOWN: [&str; 6] = ["Reward", "Evaluation", "Loss", "KL", "Entropy", "Completion length"];
    let run = Run::find(&[directory.to_owned()]).ok()?.remove(0);
    let plots = plots(&Data::new(run).ask("curves", &[RUN]).ok()?);
    let of_title = |title: &&str| plots.iter().find(|plot| plot.title == *title && plot.has_course());
    let shown: Vec<&Plot> = SHOWN.iter().filter_map(of_title).take(4).collect();
    plot::grid(&shown)
}

/// Answers and media of a report.
struct Data {
    app: App,
    name: String,
    answers: Map<String, Value>,
    curves: Value,
    media: Map<String, Value>,
    folders: BTreeSet<PathBuf>,
    previews: Previews,
    media_bytes: usize,
}

impl Data {
    fn new(run: Run) -> Self {
        let name = run.name();
        Self {
            app: App::of(vec![run]),
            name,
            answers: Map::new(),
            curves: Value::Null,
            media: Map::new(),
            folders: BTreeSet::new(),
            previews: Previews::default(),
            media_bytes: 0,
        }
    }

    /// Stores the answer to a request of the page, and returns it. Requests are named by their path and their parameters in order.
    fn ask(&mut self, path: &str, given: &[(&str, &str)]) -> Result<Value, Error> {
        let mut given = given.to_vec();
        given.sort_unstable();
        let key: Vec<String> = given.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let query = serde_urlencoded::to_string(&given).unwrap_or_default();
        // A catalogue reads for a limited time per request.
        let answer = loop {
            let answer = self.app.value(&format!("api/{path}"), &query)?;
            if answer.get("done") != Some(&Value::Bool(false)) {
                break answer;
            }
        };
        self.answers.insert(format!("{path}?{}", key.join("&")), answer.clone());
        Ok(answer)
    }

    fn fill(&mut self) -> Result<(), Error> {
        self.ask("runs", &[])?;
        self.ask("marks", &[RUN])?;
        self.verdict()?;
        self.curves = self.ask("curves", &[RUN])?;
        let known = self.ask("catalogue", &[RUN, ("measure", "reward"), ("from", "1000000000")])?;
        let texts = |list: &Value| -> Vec<String> {
            list.as_array().into_iter().flatten().filter_map(|own| Some(own.as_str()?.to_owned())).collect()
        };
        let rewards: Vec<String> =
            texts(&known["rewards"]).iter().map(|name| format!("rewards/{name}")).collect();
        let is_short = known["groups"].as_u64().is_some_and(|all| all <= MAX_GROUPS);
        for measure in ["reward".to_owned()].iter().chain(&rewards) {
            self.ask("catalogue", &[RUN, ("measure", measure), ("from", "1000000000")])?;
            if is_short {
                self.ask("catalogue", &[RUN, ("measure", measure)])?;
            }
        }
        let both = ["reward", "length", "advantage"].map(str::to_owned);
        for measure in both.iter().chain(&rewards) {
            self.ask("spread", &[RUN, ("measure", measure)])?;
            self.ask("joint", &[RUN, ("x", "length"), ("y", measure)])?;
        }
        self.groups()?;
        self.evaluations()
    }

    /// Adds the verdict, and the picture of its example.
    fn verdict(&mut self) -> Result<(), Error> {
        let verdict = self.ask("verdict", &[RUN])?;
        let example = &verdict["example"];
        let number = |name: &str| example[name].as_u64();
        if let (Some(step), Some(group), Some(at)) = (number("step"), number("group"), number("picture"))
            && let Ok(medium) = self.app.rollout_medium(step, group as usize, at as usize)
        {
            self.embed(format!("{step}-{group}-{at}"), &medium, &[]);
        }
        Ok(())
    }

    /// Adds the groups of the last step whose completions differ most.
    fn groups(&mut self) -> Result<(), Error> {
        let steps = self.ask("steps", &[("run", "0")])?;
        let Some(step) = steps["steps"].as_array().and_then(|all| all.last()).and_then(Value::as_u64) else {
            return Ok(());
        };
        let text = step.to_string();
        let given = [("run", "0"), ("step", &*text), ("from", "0"), ("limit", "500")];
        let found = self.ask("groups", &given)?;
        let spread = |group: &Value| {
            let rewards: Vec<f64> =
                group["reward"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
            let most = rewards.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let least = rewards.iter().copied().fold(f64::INFINITY, f64::min);
            if rewards.is_empty() { 0.0 } else { most - least }
        };
        let mut groups: Vec<&Value> = found["groups"].as_array().into_iter().flatten().collect();
        groups.sort_by(|a, b| spread(b).total_cmp(&spread(a)));
        for group in groups.into_iter().take(SHOWN_GROUPS) {
            let Some(at) = group["group"].as_u64() else { continue };
            let shown = self.ask("group", &[("run", "0"), ("step", &text), ("group", &at.to_string())])?;
            for (place, own) in shown["media"].as_array().into_iter().flatten().enumerate() {
                let times: Vec<f64> =
                    own["times"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
                if let Ok(medium) = self.app.rollout_medium(step, at as usize, place) {
                    self.embed(format!("{step}-{at}-{place}"), &medium, &times);
                }
            }
        }
        Ok(())
    }

    /// Adds the evaluations and the questions that changed most from the first to the last.
    fn evaluations(&mut self) -> Result<(), Error> {
        let all = self.ask("evaluations", &[("run", "0")])?;
        let step = |own: Option<&Value>| own.and_then(|own| own["step"].as_u64());
        let all = all["evaluations"].as_array().map(Vec::as_slice).unwrap_or_default();
        let (Some(first), Some(last)) = (step(all.first()), step(all.last())) else { return Ok(()) };
        if first == last {
            return Ok(());
        }
        let (before, after, limit) = (first.to_string(), last.to_string(), SHOWN_QUESTIONS.to_string());
        let given =
            [("run", "0"), ("before", &*before), ("after", &*after), ("from", "0"), ("limit", &*limit)];
        for change in [None, Some(("change", "better")), Some(("change", "worse"))] {
            let given: Vec<(&str, &str)> = given.into_iter().chain(change).collect();
            let found = self.ask("compare", &given)?;
            for row in found["rows"].as_array().into_iter().flatten() {
                let Some(at) = row["row"].as_u64() else { continue };
                for place in 0..row["media"].as_array().map_or(0, Vec::len) {
                    if let Ok(medium) = self.app.evaluation_medium(last, at as usize, place) {
                        self.embed(format!("{last}-row{at}-{place}"), &medium, &[]);
                    }
                }
            }
        }
        Ok(())
    }

    /// Adds a small copy of a picture, the frames of a clip, or a short sound, while there is room.
    fn embed(&mut self, key: String, medium: &Medium, times_secs: &[f64]) {
        if self.media.contains_key(&key) {
            return;
        }
        let (mime, bytes, times) = if medium.mime.starts_with("audio/") {
            let is_short = std::fs::metadata(&medium.path).is_ok_and(|meta| meta.len() <= MAX_SOUND_BYTES);
            match std::fs::read(&medium.path) {
                Ok(bytes) if is_short => (medium.mime, bytes, Vec::new()),
                _ => return,
            }
        } else {
            let Ok(made) = self.previews.of(medium, times_secs, FRAMES, PICTURE_PX) else { return };
            (made.mime, made.bytes.clone(), made.times_secs.clone())
        };
        if self.media_bytes + bytes.len() > MAX_MEDIA_BYTES {
            return;
        }
        self.media_bytes += bytes.len();
        self.folders.extend(medium.path.parent().map(Path::to_owned));
        let src = format!("data:{mime};base64,{}", STANDARD.encode(bytes));
        self.media.insert(key, json!({ "src": src, "times": times }));
    }
}

/// Returns the page with its scripts, its styles and the data inside. Only this script and this style are allowed, by their hashes.
fn page(name: &str, data: &Value) -> String {
    let (style, script) = (assets::style(), assets::script());
    let hash = |text: &str| format!("'sha256-{}'", STANDARD.encode(Sha256::digest(text)));
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data: blob:; media-src data:; base-uri 'none'; form-action 'none'",
        hash(&script),
        hash(&style),
    );
    // Within a script element, `<` could end it.
    let data = data.to_string().replace('<', "\\u003c");
    let body = assets::PAGE.split_once("<body>").map_or("", |(_, body)| body);
    let body = body.split_once("</body>").map_or(body, |(body, _)| body);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n<style>{style}</style>\n</head>\n\
         <body>{body}<script type=\"application/json\" id=\"data\">{data}</script>\n<script>{script}</script>\n</body>\n</html>\n",
        escaped(name),
    )
}

/// Escapes text for HTML and makes invisible characters visible.
fn escaped(text: &str) -> String {
    let of = |c: char| match c {
        '<' => "&lt;".to_owned(),
        '>' => "&gt;".to_owned(),
        '&' => "&amp;".to_owned(),
        c => c.to_string(),
    };
    omnigrpo_observe::escape(text).chars().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the data of a report.
    fn data(page: &str) -> Value {
        let text = page.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_report_is_the_page_with_its_data() {
        let directory = tempfile::tempdir().unwrap();
        let root = std::fs::canonicalize(directory.path()).unwrap();
        let row = |step: f64| {
            format!("{{\"step\":{step},\"reward\":{},\"step_time\":2,\"time/rollout\":1.5}}\n", step / 4.0)
        };
        std::fs::write(root.join("metrics.jsonl"), [1.0, 2.0, 3.0, 2.0].map(row).concat()).unwrap();
        std::fs::write(root.join("config.yaml"), "run_name: <i>mine</i>   # flag\nseed: 7   # default\n")
            .unwrap();
        let warning = "{\"step\":2,\"time\":\"\",\"kind\":\"problem\",\"rule\":\"cut_off\",\"begins\":true,\"since\":1,\"text\":\"<b>cut</b>\"}\n";
        std::fs::write(root.join("events.jsonl"), warning).unwrap();
        std::fs::create_dir(root.join("rollouts")).unwrap();
        image::RgbImage::from_pixel(640, 4, image::Rgb([255, 0, 0])).save(root.join("wide.png")).unwrap();
        let mut rollout = json!({
            "step": 2, "timestamp": "", "epoch": 0.5, "id": "r", "group": 0, "sample": 0, "prompt": "<script>alert(1)</script>",
            "completion": "</script><img src=x onerror=alert(1)>", "solution": null, "rewards": {"accuracy": 1}, "reward": 1.0,
            "advantage": -0.5, "length": 3, "media": [root.join("wide.png"), "/etc/passwd"], "finish_reason": "stop",
        });
        std::fs::write(root.join("rollouts/step-000002.jsonl"), format!("{rollout}\n")).unwrap();
        let Report { path, media_folders } = report(&root).unwrap().remove(0);
        assert!(media_folders.is_empty(), "{media_folders:?}");
        assert_eq!(path, root.join("report.html"));
        let page = std::fs::read_to_string(&path).unwrap();
        assert!(page.contains("<title>&lt;i&gt;mine&lt;/i&gt;</title>"));
        // Text of the run ends no element, and no other script may run.
        assert_eq!((page.matches("<script").count(), page.matches("</script>").count()), (2, 2));
        let script = page.rsplit("<script>").next().unwrap().split("</script>").next().unwrap();
        let hash = STANDARD.encode(Sha256::digest(script));
        assert!(page.contains(&format!("script-src 'sha256-{hash}';")));
        assert!(!script.contains("\nimport ") && !script.contains("export "), "one script without modules");
        let data = data(&page);
        let answers = &data["answers"];
        assert_eq!(
            answers["curves?run=0"]["steps"]["columns"]["reward"],
            json!([0.25, 0.5]),
            "a step that was done again counts once"
        );
        assert_eq!(answers["runs?"][0]["name"], "<i>mine</i>");
        assert_eq!(answers["marks?run=0"][0]["problem"]["text"], "<b>cut</b>");
        let group = &answers["group?group=0&run=0&step=2"];
        assert_eq!(group["samples"][0]["completion"]["text"], "</script><img src=x onerror=alert(1)>");
        assert_eq!(answers["joint?run=0&x=length&y=rewards/accuracy"]["pairs"], 1);
        let picture =
            data["media"]["2-0-0"]["src"].as_str().unwrap().strip_prefix("data:image/png;base64,").unwrap();
        let picture = image::load_from_memory(&STANDARD.decode(picture).unwrap()).unwrap();
        assert_eq!((picture.width(), picture.height()), (320, 2));
        assert_eq!(data["media"].as_object().unwrap().len(), 1, "no file that is not a medium");
        let mut plots: Vec<_> =
            std::fs::read_dir(root.join("plots")).unwrap().map(|e| e.unwrap().file_name()).collect();
        plots.sort();
        assert_eq!(plots, ["reward.svg", "step-time-by-phase.svg"], "what was not measured has no plot");
        let svg = std::fs::read_to_string(root.join("plots/reward.svg")).unwrap();
        assert!(svg.starts_with("<svg") && svg.contains(">Reward</text>"), "{svg}");
        // Directories outside of the run directory are returned if the report embeds media from them.
        let elsewhere = tempfile::tempdir().unwrap();
        let foreign = std::fs::canonicalize(elsewhere.path()).unwrap();
        std::fs::copy(root.join("wide.png"), foreign.join("theirs.png")).unwrap();
        rollout["media"] = json!([root.join("wide.png"), foreign.join("theirs.png"), "/etc/passwd"]);
        std::fs::write(root.join("rollouts/step-000002.jsonl"), format!("{rollout}\n")).unwrap();
        assert_eq!(report(&root).unwrap()[0].media_folders, BTreeSet::from([foreign.clone()]));
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
