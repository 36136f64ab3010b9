//! A checkpoint directory from a GGUF file.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use half::{bf16, f16};
use omnigrpo_gguf::{GgufFile, Tensor, TensorType};
use omnigrpo_ops::{Param, ParamDtype, Part};
use omnigrpo_text::Tokenizer;
use safetensors::tensor::{Dtype, View};

use super::{EMBEDDING, HEAD, ROTATIONS, RowOrder, config, name_in_gguf, tokenizer};
use crate::checkpoint::Checkpoint;
use crate::config_json::ConfigJson;
use crate::error::{ModelError, Result};
use crate::families::{TextClass, family_of};
use crate::weights::save::save_tensors;
use crate::weights::{Init, Problems, WeightDtype, WeightSource};

/// Values that are converted at a time.
const PIECE: usize = 1 << 16;

/// Result of [`convert_gguf`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertedGguf {
    /// Name of the family.
    pub family: &'static str,
    /// Number of weights.
    pub num_weights: usize,
    /// Properties of the checkpoint that its reader may not expect.
    pub notes: Vec<String>,
}

/// Writes a checkpoint directory from a GGUF file: `config.json`, weights, tokenizer, chat template and stop tokens.
///
/// With [`WeightDtype::Auto`], the values are those of the file to the bit: F16 and BF16 stay as they are, and values of few bits become
/// f32. Memory holds the header of the file and one tensor, in the dtype that is written. The directory must be empty; a caller that needs
/// atomicity writes into a temporary one and renames it.
///
/// # Errors
/// Returns an error if the file is unreadable, malformed or unsupported, or if the directory cannot be written.
pub fn convert_gguf(path: &Path, dir: &Path, dtype: WeightDtype) -> Result<ConvertedGguf> {
    let file = GgufFile::open(path)?;
    let class = class_of(&file)?;
    let sizes = config::Sizes::new(&file, &class)?;
    let tied = match (find(&file, EMBEDDING), find(&file, HEAD)) {
        (Some(embedding), Some(head)) => equal(&file, embedding, head)?,
        _ => true,
    };
    let mut json = sizes.config(tied)?;
    let text = tokenizer::files(&file, json["max_position_embeddings"].as_u64())?;
    if json["vocab_size"] != text.num_tokens {
        let what = format!(
            "tokenizer.ggml.tokens has {} tokens, expected {}, one for each row of tensor {EMBEDDING}",
            text.num_tokens, json["vocab_size"]
        );
        return Err(file.error(what).into());
    }
    let written = find(&file, EMBEDDING).map_or(Dtype::F32, |embedding| dtype_of(embedding, dtype));
    json["dtype"] = match written {
        Dtype::F16 => "float16",
        Dtype::BF16 => "bfloat16",
        _ => "float32",
    }
    .into();
    if let Some(object) = json.as_object_mut() {
        object.extend(text.ids);
    }

    let parsed = ConfigJson::of_object(path, json.clone());
    let family = family_of(dir, &parsed)?;
    let mut source = GgufSource {
        file: &file,
        tied,
        params: Vec::new(),
        // `Sizes` has read the rotations, and a tied head is the embedding.
        used: tied.then_some(HEAD).into_iter().chain([ROTATIONS]).map(str::to_owned).collect(),
        problems: Problems::default(),
    };
    let network = family.architecture().network(&mut source)?;
    let params = source.finish(family.name())?;
    let decoder = network.decoder.config();

    std::fs::create_dir_all(dir).map_err(ModelError::io(dir))?;
    let config = ("config.json", format!("{json:#}\n"));
    for (name, content) in text.files.iter().chain([&config]) {
        let to = dir.join(name);
        std::fs::write(&to, content).map_err(ModelError::io(&to))?;
    }
    // The files are read as those of every other checkpoint, before the weights follow.
    Checkpoint::open(dir)?;
    Tokenizer::from_dir(dir)?;

    let failed = Rc::new(RefCell::new(None));
    let piecewise = |tensor| Piecewise {
        order: RowOrder::of(Tensor::name(tensor), class.model_type, decoder),
        dtype: dtype_of(tensor, dtype),
        tensor,
        file: &file,
        failed: Rc::clone(&failed),
    };
    let tensors: Vec<_> = params.iter().map(|(param, tensor)| (param.name(), piecewise(*tensor))).collect();
    let saved = save_tensors(dir, &tensors);
    if let Some(error) = failed.take() {
        return Err(error);
    }
    saved?;
    let mut notes = Vec::new();
    if !tied {
        notes.push(format!(
            "the file has an output head of its own, {HEAD}: head and embedding are not tied, although published checkpoints of this size \
             may tie them"
        ));
    }
    if !dir.join("chat_template.jinja").exists() {
        notes.push("the file has no tokenizer.chat_template: prompts have the built-in form".to_owned());
    }
    Ok(ConvertedGguf { family: family.name(), num_weights: tensors.len(), notes })
}

/// Returns the class of language models whose architecture the file has.
fn class_of(file: &GgufFile) -> Result<TextClass> {
    const KEY: &str = "general.architecture";
    let known = TextClass::ALL.map(|class| class.model_type).join(", ");
    let Some(datum) = file.get(KEY) else {
        return Err(file.error(format!("{KEY} is missing, expected one of {known}")).into());
    };
    let class = datum.text().and_then(TextClass::named);
    class.ok_or_else(|| {
        file.error(format!("{KEY} is {}, expected one of {known}", config::shortened(datum))).into()
    })
}

fn find<'a>(file: &'a GgufFile, name: &str) -> Option<&'a Tensor> {
    file.tensors().iter().find(|tensor| tensor.name() == name)
}

/// Returns whether two tensors have the same values.
fn equal(file: &GgufFile, a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.shape() != b.shape() {
        return Ok(false);
    }
    // A multiple of all blocks.
    let mut buffers = [vec![0.0; PIECE], vec![0.0; PIECE]];
    for start in (0..a.num_values()).step_by(PIECE) {
        let len = PIECE.min(a.num_values() - start);
        for (buffer, tensor) in buffers.iter_mut().zip([a, b]) {
            file.read(tensor, start, &mut buffer[..len])?;
        }
        if buffers[0][..len] != buffers[1][..len] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns the dtype in which a tensor is written.
fn dtype_of(tensor: &Tensor, dtype: WeightDtype) -> Dtype {
    match (dtype, tensor.kind()) {
        (WeightDtype::BFloat16, _) | (WeightDtype::Auto, TensorType::Bf16) => Dtype::BF16,
        (WeightDtype::Auto, TensorType::F16) => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// A source that compares the tensors of a file with those that a network asks for, and reads no values.
struct GgufSource<'a> {
    file: &'a GgufFile,
    tied: bool,
    params: Vec<(Arc<Param>, &'a Tensor)>,
    used: HashSet<String>,
    problems: Problems,
}

impl WeightSource for GgufSource<'_> {
    fn get(&mut self, name: &str, part: Part, shape: &[usize], _init: Init) -> Result<Arc<Param>> {
        let gguf = name_in_gguf(name).unwrap_or_else(|| name.to_owned());
        let param = Arc::new(Param::outline(name, part, shape, ParamDtype::F32));
        let tensor = find(self.file, &gguf);
        match (Problems::of_shape(&gguf, tensor.map(Tensor::shape), shape), tensor) {
            (None, Some(tensor)) => self.params.push((Arc::clone(&param), tensor)),
            (problem, _) => problem.into_iter().for_each(|problem| self.problems.push(problem)),
        }
        self.used.insert(gguf);
        Ok(param)
    }

    fn tied(&mut self, _embed: &str, _head: &str, _config: bool) -> Result<bool> {
        Ok(self.tied)
    }
}

impl<'a> GgufSource<'a> {
    /// Returns the weights with their tensors, in building order.
    fn finish(mut self, family: &'static str) -> Result<Vec<(Arc<Param>, &'a Tensor)>> {
        for tensor in self.file.tensors() {
            if !self.used.contains(tensor.name()) {
                self.problems.unknown(tensor.name());
            }
        }
        self.problems.none_or(self.file.path(), family)?;
        Ok(self.params)
    }
}

/// A tensor of a file that is read when it is written.
struct Piecewise<'a> {
    tensor: &'a Tensor,
    file: &'a GgufFile,
    dtype: Dtype,
    order: RowOrder,
    /// First error of any tensor, since the writer of safetensors takes bytes only.
    failed: Rc<RefCell<Option<ModelError>>>,
}

impl View for &Piecewise<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.tensor.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = Vec::with_capacity(self.data_len());
        if self.failed.borrow().is_none()
            && let Err(error) = self.convert(&mut bytes)
        {
            *self.failed.borrow_mut() = Some(error);
        }
        bytes.resize(self.data_len(), 0);
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.tensor.num_values() * if self.dtype == Dtype::F32 { 4 } else { 2 }
    }
}

impl Piecewise<'_> {
    /// Appends the values in their dtype, with the rows in the published order.
    fn convert(&self, to: &mut Vec<u8>) -> Result<()> {
        let (tensor, total) = (self.tensor, self.tensor.num_values());
        let rows = tensor.shape()[0];
        let (columns, unit) = (total / rows, self.order.unit());
        if !rows.is_multiple_of(unit) {
            return Err(self.fail(format!("it has {rows} rows, expected a multiple of {unit}")));
        }
        let per_piece = match self.order {
            RowOrder::Same => PIECE,
            RowOrder::Neighbours(rows) => rows * columns,
        };
        let mut values = vec![0.0; per_piece.min(total)];
        for start in (0..total).step_by(per_piece) {
            let values = &mut values[..per_piece.min(total - start)];
            self.file.read(tensor, start, values)?;
            if let Some(at) = values.iter().position(|x| !x.is_finite()) {
                let (at, got) = (start + at, values[at]);
                return Err(self.fail(format!("value {at} is {got}, expected finite numbers")));
            }
            match self.order {
                RowOrder::Same => self.put(values, to),
                RowOrder::Neighbours(rows) => {
                    for row in 0..rows {
                        let from = self.order.in_gguf(row) * columns;
                        self.put(&values[from..from + columns], to);
                    }
                }
            }
        }
        Ok(())
    }

    fn put(&self, values: &[f32], to: &mut Vec<u8>) {
        match self.dtype {
            Dtype::F16 => to.extend(values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes())),
            Dtype::BF16 => to.extend(values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
            _ => to.extend(values.iter().flat_map(|x| x.to_le_bytes())),
        }
    }

    fn fail(&self, what: String) -> ModelError {
        self.file.error(format!("tensor {}: {what}", self.tensor.name())).into()
    }
}
