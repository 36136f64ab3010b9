//! Weights of experts that files hold in another form than the program.
//!
//! The program holds the first layers of all experts of a block as one tensor `[e, h, 2i]` (gate, then up) and the second ones as
//! `[e, i, h]`, the form of published Qwen3-VL mixtures. Files may hold each expert in tensors of its own, as linear layers
//! (`experts.0.gate_proj.weight [i, h]`), or all experts in one tensor that is transposed, `[e, 2i, h]` and `[e, h, i]`, as
//! `transformers` 5 saves them. Shapes tell the forms apart: of a block's two tensors, only one order fits.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use half::bf16;
use omnigrpo_kernels::parallel;
use omnigrpo_ops::{Param, Values};
use safetensors::tensor::TensorInfo;

use super::files::Entry;
use crate::error::Result;

/// Ends of the names of a block's weights in the program.
const WHOLE: [&str; 2] = ["gate_up_proj", "down_proj"];

/// Names of an expert's own layers in files, by the weight to which they belong.
const OWN: [&[&str]; 2] = [&["gate_proj.weight", "up_proj.weight"], &["down_proj.weight"]];

/// Largest accepted number of experts of a block that a file names one by one.
const MAX_EXPERTS: usize = 1 << 16;

/// A weight whose values are in several tensors, or transposed.
pub(super) struct Joined {
    /// `[e, k, n]`
    pub(super) shape: Vec<usize>,
    /// For each expert, matrices `[n, k]` whose rows together are its columns.
    parts: Vec<Part>,
}

/// A matrix of one expert.
struct Part {
    /// Name in the files, for messages.
    name: String,
    /// `None` if the files lack it.
    entry: Option<Entry>,
}

impl Joined {
    /// Removes the weights of experts that have another form from `tensors`, and returns them by the program's names.
    pub(super) fn take(tensors: &mut HashMap<String, Entry>) -> BTreeMap<String, Self> {
        let mut joined = Self::of_own_layers(tensors);
        let ends = |name: &String| name.strip_suffix(WHOLE[0])?.ends_with(".experts.").then(|| name.clone());
        let firsts: Vec<String> = tensors.keys().filter_map(ends).collect();
        for first in firsts {
            let second = first[..first.len() - WHOLE[0].len()].to_owned() + WHOLE[1];
            let shape = |name: &str| <[usize; 3]>::try_from(tensors.get(name)?.info.shape.clone()).ok();
            let (Some([e, a, b]), Some([f, c, d])) = (shape(&first), shape(&second)) else { continue };
            let is_there = e == f && (1..=MAX_EXPERTS).contains(&e) && b > 0 && d > 0;
            if is_there && b == c && Some(a) == d.checked_mul(2) {
                for name in [first, second] {
                    let entry = tensors.remove(&name).and_then(|entry| Self::transposed(&name, &entry));
                    joined.extend(entry.map(|weight| (name, weight)));
                }
            }
        }
        joined
    }

    /// Joins the layers that belong to one expert each.
    fn of_own_layers(tensors: &mut HashMap<String, Entry>) -> BTreeMap<String, Self> {
        // Numbers of the experts by the names' common start.
        let mut found: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
        for name in tensors.keys() {
            let Some((start, end)) = name.split_once(".experts.") else { continue };
            let Some((number, layer)) = end.split_once('.') else { continue };
            let number = number.parse::<usize>().ok().filter(|&number| number < MAX_EXPERTS);
            if let (Some(number), true) = (number, OWN.iter().any(|own| own.contains(&layer))) {
                found.entry(format!("{start}.experts.")).or_default().insert(number);
            }
        }
        let mut joined = BTreeMap::new();
        for (start, numbers) in found {
            // A few may be missing, which is an error that names them. Names with large numbers alone are no block.
            let count = numbers.last().map_or(0, |last| last + 1);
            if count > 2 * numbers.len() {
                continue;
            }
            for (whole, own) in WHOLE.into_iter().zip(OWN) {
                let names = (0..count).flat_map(|e| own.iter().map(move |layer| (e, layer)));
                let names = names.map(|(e, layer)| format!("{start}{e}.{layer}"));
                let parts: Vec<Part> =
                    names.map(|name| Part { entry: tensors.remove(&name), name }).collect();
                let shape = parts.iter().find_map(|part| part.shape());
                let Some([n, k]) = shape else { continue };
                let shape = vec![count, k, n.saturating_mul(own.len())];
                joined.insert(format!("{start}{whole}"), Self { shape, parts });
            }
        }
        joined
    }

    /// Splits a transposed tensor `[e, n, k]` into its experts.
    fn transposed(name: &str, entry: &Entry) -> Option<Self> {
        let &[e, n, k] = entry.info.shape.as_slice() else { return None };
        let (start, end) = entry.info.data_offsets;
        let bytes = (end - start).checked_div(e)?;
        let part = |i: usize| {
            let data_offsets = (start + i * bytes, start + (i + 1) * bytes);
            let info = TensorInfo { dtype: entry.info.dtype, shape: vec![n, k], data_offsets };
            Part { name: name.to_owned(), entry: Some(Entry { shard: entry.shard, info }) }
        };
        Some(Self { shape: vec![e, k, n], parts: (0..e).map(part).collect() })
    }

    /// Returns the tensors of the files, or their parts.
    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.parts.iter().filter_map(|part| part.entry.as_ref())
    }

    /// Reads the weight; `read` reads a tensor of a file. The inner error says what is wrong with the values.
    pub(super) fn read(
        &self,
        mut read: impl FnMut(&Entry) -> Result<std::result::Result<Values, String>>,
    ) -> Result<std::result::Result<Values, String>> {
        let &[e, k, n] = self.shape.as_slice() else { return Ok(Err("expected three axes".into())) };
        let rows = n * e / self.parts.len().max(1);
        for part in &self.parts {
            match part.shape() {
                Some(shape) if shape == [rows, k] => {}
                Some(shape) => {
                    return Ok(Err(format!("{} has shape {shape:?}, expected {:?}", part.name, [rows, k])));
                }
                None => return Ok(Err(format!("{} is missing", part.name))),
            }
        }
        let mut all: Option<Values> = None;
        for (i, part) in self.parts.iter().enumerate() {
            let Some(entry) = &part.entry else { continue };
            let own = match read(entry)? {
                Ok(values) => values,
                Err(what) => return Ok(Err(format!("{}: {what}", part.name))),
            };
            // The part's first column in the matrix of its expert.
            let (expert, column) = (i * rows / n, i * rows % n);
            let at = expert * k * n;
            match (all.get_or_insert_with(|| zeros_as(&own, e * k * n)), own) {
                (Values::F32(to), Values::F32(own)) => transpose(&own, k, &mut to[at..at + k * n], n, column),
                (Values::Bf16(to), Values::Bf16(own)) => {
                    transpose(&own, k, &mut to[at..at + k * n], n, column)
                }
                _ => {
                    return Ok(Err(format!("{} has another dtype than {}", part.name, self.parts[0].name)));
                }
            }
        }
        Ok(all.ok_or_else(|| "no experts".to_owned()))
    }
}

impl Part {
    fn shape(&self) -> Option<[usize; 2]> {
        self.entry.as_ref()?.info.shape.as_slice().try_into().ok()
    }
}

fn zeros_as(like: &Values, len: usize) -> Values {
    match like {
        Values::F32(_) => Values::F32(vec![0.0; len]),
        Values::Bf16(_) => Values::Bf16(vec![bf16::ZERO; len]),
    }
}

/// A layer of one expert, as a tensor of its own.
#[derive(Clone, Copy)]
pub(super) struct OwnLayer {
    /// `[n, k]`
    pub(super) shape: [usize; 2],
    /// First value of the expert's matrix in the weight of all experts.
    start: usize,
    /// Columns of that matrix, and the first one that belongs to the layer.
    columns: [usize; 2],
}

/// Returns the layers of the single experts of a weight `[e, k, n]`, with their names in files.
pub(super) fn own_layers(weight: &Param) -> Vec<(String, OwnLayer)> {
    let &[e, k, n] = weight.shape() else { return Vec::new() };
    let of_name = WHOLE.iter().zip(OWN).find_map(|(end, own)| Some((weight.name().strip_suffix(end)?, own)));
    let Some((start, own)) = of_name else { return Vec::new() };
    let width = n / own.len();
    let layers = (0..e).flat_map(|e| own.iter().enumerate().map(move |(i, layer)| (e, i, layer)));
    let layer = |(e, i, layer): (usize, usize, &&str)| {
        let own = OwnLayer { shape: [width, k], start: e * k * n, columns: [n, i * width] };
        (format!("{start}{e}.{layer}"), own)
    };
    layers.map(layer).collect()
}

impl OwnLayer {
    /// Returns the values of the layer, `[n, k]`, from those of the weight of all experts.
    pub(super) fn values<T: Copy + Send + Sync>(&self, all: &[T]) -> Vec<T> {
        let ([n, k], [width, first]) = (self.shape, self.columns);
        let expert = &all[self.start..self.start + k * width];
        let column = |c: usize| expert.iter().skip(first + c).step_by(width).copied();
        (0..n).flat_map(column).collect()
    }
}

/// Rows that are transposed together, so that what they read and write stays in the cache.
const ROWS: usize = 32;

/// Writes the rows of `from [_, k]` as columns of `to [k, n]`, from this column on.
pub(super) fn transpose<T: Copy + Send + Sync>(from: &[T], k: usize, to: &mut [T], n: usize, column: usize) {
    let rows = from.len() / k.max(1);
    let bands = to.chunks_mut(ROWS * n.max(1)).enumerate();
    parallel::map(bands, 2 * from.len(), |(band, to)| {
        for first in (0..rows).step_by(ROWS) {
            for (i, to) in to.chunks_exact_mut(n).enumerate() {
                let own = first..rows.min(first + ROWS);
                let at = band * ROWS + i;
                to[column..][own.clone()].iter_mut().zip(own).for_each(|(to, r)| *to = from[r * k + at]);
            }
        }
    });
}
