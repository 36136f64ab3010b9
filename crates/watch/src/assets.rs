//! Files of the page, embedded in the binary. `page/uplot.js` and `page/uplot.css` draw the charts: uPlot 1.6.32, MIT. Its
//! licence
//! is stored beside these files and linked from the page.

/// Name, content type and content of each file.
pub(crate) const FILES: &[(&str, &str, &str)] = &[
    ("app.css", CSS, include_str!("page/app.css")),
    ("app.js", JS, include_str!("page/app.js")),
    ("colours.css", CSS, COLOURS),
    ("charts.js", JS, include_str!("page/charts.js")),
    ("distributions.js", JS, include_str!("page/distributions.js")),
    ("evaluations.js", JS, include_str!("page/evaluations.js")),
    ("export.js", JS, include_str!("page/export.js")),
    ("groups.js", JS, include_str!("page/groups.js")),
    ("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("media.js", JS, include_str!("page/media.js")),
    ("rollouts.js", JS, include_str!("page/rollouts.js")),
    ("rows.js", JS, include_str!("page/rows.js")),
    ("shared.js", JS, include_str!("page/shared.js")),
    ("stats.js", JS, include_str!("page/stats.js")),
    ("uplot.css", CSS, include_str!("page/uplot.css")),
    ("uplot.js", JS, include_str!("page/uplot.js")),
    ("uplot.LICENSE", "text/plain; charset=utf-8", include_str!("page/uplot.LICENSE")),
];

/// Colours of the page and of reports.
pub(crate) const COLOURS: &str = include_str!("page/colours.css");

/// HTML of the page.
pub(crate) const PAGE: &str = include_str!("page/index.html");

const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
