//! Rotary settings of a language model: base, axes, and scaling for sequences longer than those in training.
//!
//! Source: `transformers` 5.23 `modeling_rope_utils.py`. `rope_scaling` takes precedence over `rope_parameters`, and `rope_type`
//! over `type`. Unsupported: `longrope` and other kinds without a formula here; and, with
//! `dynamic`, positions beyond `max_position_embeddings`, where its frequencies would depend on the longest sequence of a batch.

use std::f64::consts::TAU;

use crate::config_json::ConfigJson;
use crate::decoder::{PositionAxes, TextDefaults};
use crate::error::Result;

/// Rotary settings.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// Axis of the position (temporal, height, width) that rotates each pair of a head; `None` for plain positions.
    pub axes: Option<Vec<usize>>,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Division of all frequencies by a factor.
    Linear {
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// No scaling within `max_position_embeddings`; positions beyond it are unsupported.
    Dynamic,
    /// YaRN (arXiv 2309.00071): slow frequencies are divided, fast ones are not, with a ramp between them.
    Yarn {
        /// Divisor of slow frequencies.
        factor: f64,
        /// Longest sequence of the original training, in tokens.
        original: f64,
        /// Number of turns over that length at which the ramp begins and ends.
        turns: [f64; 2],
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        /// Factor of the rotated queries and keys.
        attention: f64,
    },
    /// The rule of Llama 3.1: like YaRN, with the ramp over wavelengths.
    Llama3 {
        /// Divisor of slow frequencies.
        factor: f64,
        /// Longest sequence of the original training, in tokens.
        original: f64,
        /// Original length divided by the wavelengths at which the ramp ends and begins.
        turns: [f64; 2],
    },
}

impl RopeScaling {
    fn parse(rope: &ConfigJson, text: &ConfigJson, class: &TextDefaults) -> Result<Self> {
        let multimodal = class.axes != PositionAxes::One;
        let kind = match rope.text("rope_type")? {
            Some(kind) => kind,
            None => rope.text("type")?.unwrap_or("default"),
        };
        let positive = |key: &str, default: Option<f64>| match (rope.get(key), default) {
            (None, None) => Err(rope.error(format!("{key} of rope_scaling {kind:?} is missing"))),
            (_, default) => match rope.number(key, default.unwrap_or_default())? {
                x if x > 0.0 => Ok(x),
                x => Err(rope.error(format!("{key} of rope_scaling is {x}; expected a number above 0"))),
            },
        };
        let original = || -> Result<f64> {
            let longest = text.size("max_position_embeddings", Some(class.max_positions))?;
            let longest = text.size("original_max_position_embeddings", Some(longest))?;
            Ok(rope.size("original_max_position_embeddings", Some(longest))? as f64)
        };
        let ramp = |rises: bool| match rises {
            true => Ok(()),
            false => Err(rope.error("rope_scaling: the fast bound of the ramp must be above the slow one")),
        };
        Ok(match kind {
            "default" => Self::None,
            "mrope" if multimodal => Self::None,
            "linear" => Self::Linear { factor: positive("factor", None)? },
            "dynamic" => {
                positive("factor", None)?;
                Self::Dynamic
            }
            "yarn" => {
                let factor = positive("factor", None)?;
                // `transformers` treats zero as absent here.
                let number = |key: &str| rope.number(key, 0.0).map(|x| (x != 0.0).then_some(x));
                let scale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
                let own = match (number("mscale")?, number("mscale_all_dim")?) {
                    (Some(mscale), Some(all)) => scale(mscale) / scale(all),
                    _ => scale(1.0),
                };
                let turns = [number("beta_fast")?.unwrap_or(32.0), number("beta_slow")?.unwrap_or(1.0)];
                ramp(turns[0] > turns[1] && turns[1] > 0.0)?;
                let attention = positive("attention_factor", Some(own))?;
                Self::Yarn {
                    factor,
                    original: original()?,
                    turns,
                    truncate: rope.boolean("truncate", true)?,
                    attention,
                }
            }
            "llama3" => {
                let turns = [positive("low_freq_factor", None)?, positive("high_freq_factor", None)?];
                ramp(turns[1] > turns[0])?;
                Self::Llama3 { factor: positive("factor", None)?, original: original()?, turns }
            }
            other => {
                let mrope = if multimodal { "mrope, " } else { "" };
                let what = format!("expected default, {mrope}linear, dynamic, yarn or llama3");
                return Err(rope.error(format!("rope_scaling is of type {other:?}; {what}")));
            }
        })
    }
}

/// Returns the axis of the position that rotates each pair of a head; `None` for plain positions.
fn pair_axes(rope: &ConfigJson, dim: usize, kind: PositionAxes, hybrid: bool) -> Result<Option<Vec<usize>>> {
    let section = rope.sizes("mrope_section")?;
    if kind == PositionAxes::One {
        return match section {
            None => Ok(None),
            Some(section) => {
                let what = "positions of this family have one axis";
                Err(rope.error(format!("mrope_section is {section:?}; {what}")))
            }
        };
    }
    let interleaved = kind == PositionAxes::Interleaved;
    if rope.boolean("mrope_interleaved", interleaved)? != interleaved {
        let what = "which this family does not support";
        return Err(rope.error(format!("mrope_interleaved is {}, {what}", !interleaved)));
    }
    let usual = match (interleaved, hybrid) {
        (true, true) => [11, 11, 10],
        (true, false) => [24, 20, 20],
        (false, _) => [16, 24, 24],
    };
    match section.unwrap_or_else(|| usual.to_vec())[..] {
        [t, h, w] if t.checked_add(h).and_then(|n| n.checked_add(w)) == Some(dim / 2) => {
            Ok(Some((0..dim / 2).map(|pair| kind.of_pair(pair, [t, h, w])).collect()))
        }
        ref other => {
            let what = format!("expected three sizes that sum to {}", dim / 2);
            Err(rope.error(format!("mrope_section is {other:?}; {what}")))
        }
    }
}

/// Returns the rotary settings of a language model.
fn section(text: &ConfigJson) -> Result<ConfigJson> {
    let given = text.section("rope_scaling")?.filter(|rope| !rope.object().is_empty());
    match given {
        Some(rope) => Ok(rope),
        None => {
            Ok(text.section("rope_parameters")?.unwrap_or_else(|| text.with_object(serde_json::json!({}))))
        }
    }
}

impl Rope {
    /// Reads the settings of a language model of this class that rotates `dim` columns of each head.
    ///
    /// # Errors
    /// Returns an error if the scaling is unknown or incomplete, or the axes do not fill a head.
    pub fn parse(text: &ConfigJson, dim: usize, class: &TextDefaults) -> Result<Self> {
        let TextDefaults { theta, axes, .. } = *class;
        let rope = section(text)?;
        let theta = rope.number("rope_theta", text.number("rope_theta", theta)?)?;
        if theta <= 1.0 {
            return Err(rope.error(format!("rope_theta is {theta}; expected a number above 1")));
        }
        let scaling = RopeScaling::parse(&rope, text, class)?;
        Ok(Self { theta, axes: pair_axes(&rope, dim, axes, class.hybrid)?, scaling })
    }

    /// Returns the number of columns of a head of `dim` columns that are rotated.
    ///
    /// # Errors
    /// Returns an error if the class rotates whole heads and the file a part of them, or the part is not an even number of columns.
    pub fn columns(text: &ConfigJson, dim: usize, class: &TextDefaults) -> Result<usize> {
        let rope = section(text)?;
        let usual = if class.hybrid { 0.25 } else { 1.0 };
        let part = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", usual)?)?;
        if !class.hybrid && part != 1.0 {
            return Err(rope.error(format!("partial_rotary_factor is {part}; only 1 is supported")));
        }
        let columns = (dim as f64 * part) as usize;
        match (0.0..=1.0).contains(&part) && columns > 0 && columns.is_multiple_of(2) {
            true => Ok(columns),
            false => {
                let what = format!("partial_rotary_factor is {part}, which is {columns} of {dim} columns");
                Err(rope.error(format!("{what}; expected an even number of columns above 0")))
            }
        }
    }

    /// Returns the frequency of each pair of a head of `dim` columns, in radians per position.
    pub fn frequencies(&self, dim: usize) -> Vec<f32> {
        let width = dim as f64;
        let plain = (0..dim / 2).map(|i| 1.0 / self.theta.powf(2.0 * i as f64 / width));
        let scaled: Vec<f64> = match self.scaling {
            RopeScaling::None | RopeScaling::Dynamic => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|f| f / factor).collect(),
            RopeScaling::Yarn { factor, original, turns, truncate, .. } => {
                // Computes the pair that makes this number of turns over the original length.
                let pair = |turns: f64| width * (original / (turns * TAU)).ln() / (2.0 * self.theta.ln());
                let [low, high] = turns.map(pair);
                let (low, high) = if truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(width - 1.0));
                let high = if low == high { high + 0.001 } else { high };
                let ramp = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain.enumerate().map(|(i, f)| f / factor * ramp(i) + f * (1.0 - ramp(i))).collect()
            }
            RopeScaling::Llama3 { factor, original, turns: [low, high] } => {
                let scale = |f: f64| {
                    let turns = original * f / TAU;
                    let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    f / factor * (1.0 - smooth) + f * smooth
                };
                plain.map(scale).collect()
            }
        };
        scaled.into_iter().map(|f| f as f32).collect()
    }

    /// Returns the factor of the rotated queries and keys.
    pub fn attention(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention, .. } => attention as f32,
            _ => 1.0,
        }
    }
}
