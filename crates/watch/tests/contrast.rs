//! The colours of the page against WCAG 2.2 AA: text 4.5 : 1 on what it stands on, curves and marks 3 : 1.
#![allow(clippy::unwrap_used, clippy::panic, missing_docs)]

use std::collections::BTreeMap;

const COLOURS: &str = include_str!("../src/page/colours.css");
const STYLE: &str = include_str!("../src/page/app.css");

type Rgb = [f64; 3];
type Theme = BTreeMap<String, Rgb>;

/// The colours of a rule: `--name: #rrggbb;`.
fn colours(rule: &str) -> Theme {
    let pairs = rule.split(';').filter_map(|part| part.trim().strip_prefix("--")?.split_once(": #"));
    let channel = |hex: &str, at: usize| f64::from(u8::from_str_radix(&hex[at..at + 2], 16).unwrap()) / 255.0;
    pairs.map(|(name, hex)| (name.to_owned(), [0, 2, 4].map(|at| channel(hex, at)))).collect()
}

/// The light theme, the dark one of the system, and the dark one of the button.
fn themes() -> [Theme; 3] {
    let rules: Vec<Theme> = COLOURS
        .split('{')
        .map(|part| colours(part.split('}').next().unwrap()))
        .filter(|theme| !theme.is_empty())
        .collect();
    rules.try_into().unwrap()
}

fn linear(value: f64) -> f64 {
    if value <= 0.040_45 { value / 12.92 } else { ((value + 0.055) / 1.055).powf(2.4) }
}

fn coded(value: f64) -> f64 {
    let value = value.clamp(0.0, 1.0);
    if value <= 0.003_130_8 { 12.92 * value } else { 1.055 * value.powf(1.0 / 2.4) - 0.055 }
}

fn contrast(a: Rgb, b: Rgb) -> f64 {
    let luminance = |c: Rgb| 0.2126 * linear(c[0]) + 0.7152 * linear(c[1]) + 0.0722 * linear(c[2]);
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

fn times(m: [[f64; 3]; 3], v: Rgb) -> Rgb {
    m.map(|row| row.iter().zip(v).map(|(a, b)| a * b).sum())
}

/// `color-mix(in oklab, over SHARE, under)` of opaque colours.
fn mixed(over: Rgb, share: f64, under: Rgb) -> Rgb {
    const LMS: [[f64; 3]; 3] = [
        [0.412_221_470_8, 0.536_332_536_3, 0.051_445_992_9],
        [0.211_903_498_2, 0.680_699_545_1, 0.107_396_956_6],
        [0.088_302_461_9, 0.281_718_837_6, 0.629_978_700_5],
    ];
    const RGB: [[f64; 3]; 3] = [
        [4.076_741_662_1, -3.307_711_591_3, 0.230_969_929_2],
        [-1.268_438_004_6, 2.609_757_401_1, -0.341_319_396_5],
        [-0.004_196_086_3, -0.703_418_614_7, 1.707_614_701_0],
    ];
    // The last step to Lab is linear, so mixing before it is the same.
    let roots = |c: Rgb| times(LMS, c.map(linear)).map(f64::cbrt);
    let (a, b) = (roots(over), roots(under));
    let mix = [0, 1, 2].map(|at| (a[at] * share + b[at] * (1.0 - share)).powi(3));
    times(RGB, mix).map(coded)
}

#[test]
fn known_ratios_and_mixtures() {
    assert!((contrast([0.0; 3], [1.0; 3]) - 21.0).abs() < 1e-9);
    // #767676 on white is the lightest grey that passes.
    assert!((contrast([f64::from(0x76) / 255.0; 3], [1.0; 3]) - 4.54).abs() < 0.01);
    let white = mixed([1.0; 3], 0.3, [1.0; 3]);
    assert!(white.iter().all(|channel| (channel - 1.0).abs() < 1e-4), "{white:?}");
    let half = mixed([1.0; 3], 0.5, [0.0; 3]);
    assert!((half[0] - 99.0 / 255.0).abs() < 2.0 / 255.0, "{half:?}");
}

#[test]
fn every_theme_has_every_colour_and_both_dark_ones_are_the_same() {
    let [light, system, button] = themes();
    assert_eq!(system, button);
    assert_eq!(light.keys().collect::<Vec<_>>(), system.keys().collect::<Vec<_>>());
    assert_eq!(light.keys().filter(|name| name.starts_with("run-")).count(), 9);
    // Another colour in the style would not be looked at here.
    let literal = STYLE.match_indices('#').find(|(at, _)| {
        let word: String = STYLE[at + 1..].chars().take_while(char::is_ascii_alphanumeric).collect();
        [3, 6].contains(&word.len()) && word.chars().all(|c| c.is_ascii_hexdigit())
    });
    assert_eq!(literal.map(|(at, _)| &STYLE[at..at + 7]), None);
}

#[test]
fn text_and_curves_can_be_read() {
    for (name, theme) in ["light", "dark"].iter().zip(themes()) {
        let of = |colour: &str| theme[colour];
        let mut bad = Vec::new();
        let mut check = |what: String, a: Rgb, b: Rgb, least: f64| {
            let ratio = contrast(a, b);
            if ratio < least {
                bad.push(format!("{name}, {what}: {ratio:.2}"));
            }
        };
        for under in ["paper", "card"] {
            for text in ["ink", "quiet", "accent", "good", "bad"] {
                check(format!("{text} on {under}"), of(text), of(under), 4.5);
            }
            for line in (0..9).map(|at| format!("run-{at}")).chain(["warm".into()]) {
                check(format!("{line} on {under}"), of(&line), of(under), 3.0);
            }
        }
        check("navigation".into(), of("on-accent"), of("accent"), 4.5);
        // What lies under text in tables, cards and tokens.
        for (colour, share, under) in [
            ("warm", 0.16, "card"),
            ("warm", 0.30, "card"),
            ("bad", 0.22, "card"),
            ("bad", 0.22, "paper"),
            ("good", 0.30, "card"),
            ("bad", 0.30, "card"),
            ("good", 0.30, "paper"),
            ("bad", 0.30, "paper"),
            ("warm", 0.45, "paper"),
            ("good", 0.45, "card"),
            ("bad", 0.45, "card"),
        ] {
            let under_text = mixed(of(colour), share, of(under));
            check(format!("ink on {share} {colour} on {under}"), of("ink"), under_text, 4.5);
        }
        assert!(bad.is_empty(), "{bad:#?}");
    }
}
