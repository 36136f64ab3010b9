//! The page, as files in the binary. `page/uplot.js` and `page/uplot.css` are the charts: uPlot 1.6.32, MIT, with its licence
//! beside them and in the page.

/// Name, type and content of each file.
pub(crate) const FILES: &[(&str, &str, &str)] = &[
    ("app.css", CSS, include_str!("page/app.css")),
    ("app.js", JS, include_str!("page/app.js")),
    ("colours.css", CSS, COLOURS),
    ("charts.js", JS, include_str!("page/charts.js")),
    ("evaluations.js", JS, include_str!("page/evaluations.js")),
    ("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("media.js", JS, include_str!("page/media.js")),
    ("rollouts.js", JS, include_str!("page/rollouts.js")),
    ("shared.js", JS, include_str!("page/shared.js")),
    ("uplot.css", CSS, include_str!("page/uplot.css")),
    ("uplot.js", JS, include_str!("page/uplot.js")),
    ("uplot.LICENSE", "text/plain; charset=utf-8", include_str!("page/uplot.LICENSE")),
];

/// The colours of the page and of reports.
pub(crate) const COLOURS: &str = include_str!("page/colours.css");

/// The page itself.
pub(crate) const PAGE: &str = include_str!("page/index.html");

const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
