//! Files of the page, embedded in the binary. `page/uplot.js` and `page/uplot.css` draw the charts: uPlot 1.6.32, MIT. Its licence
//! is stored beside these files and linked from the page.

/// Name, content type and content of each file.
pub(crate) const FILES: &[(&str, &str, &str)] = &[
    ("app.css", CSS, include_str!("page/app.css")),
    ("app.js", JS, include_str!("page/app.js")),
    ("colours.css", CSS, include_str!("page/colours.css")),
    ("charts.js", JS, include_str!("page/charts.js")),
    ("distributions.js", JS, include_str!("page/distributions.js")),
    ("evaluations.js", JS, include_str!("page/evaluations.js")),
    ("export.js", JS, include_str!("page/export.js")),
    ("groups.js", JS, include_str!("page/groups.js")),
    ("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("media.js", JS, include_str!("page/media.js")),
    ("rollouts.js", JS, include_str!("page/rollouts.js")),
    ("rows.js", JS, include_str!("page/rows.js")),
    ("runs.js", JS, include_str!("page/runs.js")),
    ("shared.js", JS, include_str!("page/shared.js")),
    ("stats.js", JS, include_str!("page/stats.js")),
    ("table.js", JS, concat!("export const CHARTS = ", include_str!("page/table.json"), ";\n")),
    ("uplot.css", CSS, include_str!("page/uplot.css")),
    ("uplot.js", JS, include_str!("page/uplot.js")),
    ("verdict.js", JS, include_str!("page/verdict.js")),
    ("uplot.LICENSE", "text/plain; charset=utf-8", include_str!("page/uplot.LICENSE")),
];

/// Charts of the page, as JSON. `band` names the metrics of the lower and upper edge of a line, and `spread` a distance to both sides.
/// `{}` stands for any part of a name. A title with `{}` is a chart of its own for each such part.
pub(crate) const CHARTS: &str = include_str!("page/table.json");

/// HTML of the page.
pub(crate) const PAGE: &str = include_str!("page/index.html");

const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";

/// Modules of the page, each after those that it imports.
const MODULES: [&str; 14] = [
    "shared",
    "stats",
    "export",
    "table",
    "groups",
    "media",
    "charts",
    "distributions",
    "rollouts",
    "rows",
    "evaluations",
    "verdict",
    "runs",
    "app",
];

pub(crate) fn content(name: &str) -> &'static str {
    FILES.iter().find(|(own, ..)| *own == name).map_or("", |(.., content)| content)
}

/// Returns the styles of the page as one text.
pub(crate) fn style() -> String {
    ["uplot.css", "colours.css", "app.css"].map(content).concat()
}

/// Returns the scripts of the page as one script without modules, for a page that is a file. A module becomes a function that
/// returns what it exports.
pub(crate) fn script() -> String {
    let mut out = format!("{}\n", content("uplot.js"));
    for name in MODULES {
        let mut exported = Vec::new();
        let mut body = String::new();
        for line in content(&format!("{name}.js")).lines() {
            let line = match line.strip_prefix("import ").and_then(|rest| rest.split_once(" from './")) {
                Some((what, from)) => {
                    let from = from.trim_end_matches(".js';");
                    format!("const {} = {from}_;", what.trim_start_matches("* as "))
                }
                None => line.to_owned(),
            };
            let line = match line.strip_prefix("export ") {
                Some(rest) => {
                    let words = rest
                        .split([' ', '(', '='])
                        .filter(|word| !["async", "function", "const", "class"].contains(word));
                    exported.extend(words.map(str::to_owned).next());
                    rest.to_owned()
                }
                None => line,
            };
            body.push_str(&line);
            body.push('\n');
        }
        out.push_str(&format!(
            "const {name}_ = (() => {{\n{body}return {{ {} }};\n}})();\n",
            exported.join(", ")
        ));
    }
    out
}
