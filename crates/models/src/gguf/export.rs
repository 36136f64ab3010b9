//! A GGUF file from a model.

use std::path::Path;

use omnigrpo_gguf::{GgufWriter, Metadata, TensorType, Value as Datum};
use omnigrpo_kernels::Stored;
use omnigrpo_ops::{Param, ParamDtype};

use super::{ROTATIONS, RowOrder, config, name_in_gguf, tokenizer};
use crate::error::{ModelError, Result};
use crate::families::TextClass;
use crate::model::Model;

/// Values that are converted at a time.
const PIECE: usize = 1 << 16;

/// Precision of the matrices of a GGUF file. Vectors are always in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum GgufPrecision {
    /// Half precision.
    #[default]
    F16,
    /// 8 bits, 32 values with a scale. Matrices whose rows are no multiple of 32 have half precision.
    Q8_0,
}

impl Model {
    /// Writes weights, tokenizer, chat template and stop tokens as one GGUF file that llama.cpp loads. The file has its final name while it
    /// is written.
    ///
    /// # Errors
    /// Returns an error if the family is no text model that llama.cpp has, if its rotations, tokenizer or stop tokens cannot be
    /// expressed, if weights are quantised or too large for half precision, or if the file cannot be written.
    pub fn save_gguf(&self, path: &Path, precision: GgufPrecision) -> Result<()> {
        let fail = |what: String| ModelError::layout(what);
        let kind = self.checkpoint().config().text("model_type")?.unwrap_or_default();
        let Some(class) = TextClass::named(kind) else {
            let known = TextClass::ALL.map(|class| class.model_type).join(", ");
            return Err(fail(format!(
                "a checkpoint of {kind:?} cannot be written as GGUF; expected one of {known}"
            )));
        };
        let decoder = self.decoder().config();
        let architecture = class.model_type;
        let (sizes, rotations) = config::metadata_of(decoder, architecture).map_err(fail)?;
        let name = self.dir().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let file_type = match precision {
            GgufPrecision::F16 => 1,
            GgufPrecision::Q8_0 => 7,
        };
        let mut metadata: Metadata = vec![
            ("general.architecture".into(), architecture.into()),
            ("general.type".into(), "model".into()),
            ("general.name".into(), Datum::Text(name)),
            ("general.file_type".into(), Datum::U32(file_type)),
            ("general.quantization_version".into(), Datum::U32(2)),
        ];
        metadata.extend(sizes);
        metadata.extend(tokenizer::metadata_of(self)?);

        let mut tensors = Vec::new();
        if let Some(divisors) = &rotations {
            tensors.push((ROTATIONS.to_owned(), vec![divisors.len()], TensorType::F32));
        }
        for param in self.base_params() {
            if let ParamDtype::Quantised(_) = param.dtype() {
                let what =
                    "is quantised in memory; export the checkpoint without `load_in_8bit` and `load_in_4bit`";
                return Err(fail(format!("tensor {} {what}", param.name())));
            }
            let name = name_in_gguf(param.name())
                .ok_or_else(|| fail(format!("tensor {} has no name in GGUF", param.name())))?;
            tensors.push((name, param.shape().to_vec(), type_of(param.shape(), precision)));
        }
        let mut writer = GgufWriter::create(path, &metadata, &tensors)?;
        if let Some(divisors) = &rotations {
            writer.write(divisors)?;
        }
        let named = &tensors[usize::from(rotations.is_some())..];
        for (param, (name, _, _)) in self.base_params().iter().zip(named) {
            write(param, RowOrder::of(name, architecture, decoder), &mut writer)?;
        }
        Ok(writer.finish()?)
    }
}

/// Returns the type in which a tensor is written.
fn type_of(shape: &[usize], precision: GgufPrecision) -> TensorType {
    match (shape, precision) {
        (&[_, columns], GgufPrecision::Q8_0) if columns.is_multiple_of(TensorType::Q8_0.block_values()) => {
            TensorType::Q8_0
        }
        (&[_, _], _) => TensorType::F16,
        _ => TensorType::F32,
    }
}

/// Writes the values of a weight row by row, in the order of llama.cpp.
fn write(param: &Param, order: RowOrder, writer: &mut GgufWriter) -> Result<()> {
    let rows = param.shape()[0];
    let columns = param.len() / rows;
    let guard = param.read();
    let weight = guard.weight(rows, columns);
    // The published row of each row in GGUF.
    let mut published = vec![0; rows];
    (0..rows).for_each(|row| published[order.in_gguf(row)] = row);
    let mut piece = Vec::new();
    for (i, &row) in published.iter().enumerate() {
        match weight.rows(row..row + 1).stored() {
            Stored::F32(values) => piece.extend_from_slice(values),
            Stored::Bf16(values) => piece.extend(values.iter().map(|x| x.to_f32())),
            Stored::Quantised(values) => {
                let at = piece.len();
                piece.resize(at + columns, 0.0);
                values.widen(&mut piece[at..]);
            }
        }
        if piece.len() >= PIECE || i + 1 == rows {
            writer.write(&piece)?;
            piece.clear();
        }
    }
    Ok(())
}
