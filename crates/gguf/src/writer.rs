//! Writes a file.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::blocks;
use crate::error::{GgufError, Result};
use crate::header::num_bytes;
use crate::metadata::{LIST, Value};
use crate::types::TensorType;
use crate::{ALIGNMENT, ALIGNMENT_KEY, MAGIC, VERSION};

/// A writer of a file. [`Self::create`] writes metadata and the list of tensors; then the values follow in the order of the list.
pub struct GgufWriter {
    path: PathBuf,
    to: BufWriter<File>,
    /// Name, number of values and type of each tensor.
    tensors: Vec<(String, usize, TensorType)>,
    /// Tensor whose values are written next, and how many of them have been.
    next: (usize, usize),
    bytes: Vec<u8>,
}

impl GgufWriter {
    /// Creates a file with metadata and a list of tensors: name, shape as in PyTorch, and type, which is F32, F16 or Q8_0.
    ///
    /// # Errors
    /// Returns an error if a type cannot be written, a row of a tensor is no whole number of blocks, or the file cannot be written.
    pub fn create(
        path: &Path,
        metadata: &[(String, Value)],
        tensors: &[(String, Vec<usize>, TensorType)],
    ) -> Result<Self> {
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            if key == ALIGNMENT_KEY {
                let what = format!(
                    "{ALIGNMENT_KEY} is given, expected none: tensors are aligned to {ALIGNMENT} bytes"
                );
                return Err(GgufError::File { path: path.to_path_buf(), what });
            }
            if let Value::List(list) = value
                && list.iter().any(|one| one.type_id() != list[0].type_id() || one.type_id() == LIST)
            {
                let what =
                    format!("key {key} is a list of lists or of several types, expected values of one type");
                return Err(GgufError::File { path: path.to_path_buf(), what });
            }
            put_text(&mut header, key);
            header.extend(value.type_id().to_le_bytes());
            put_value(&mut header, value);
        }
        let (mut at, mut listed) = (0u64, Vec::new());
        for (name, shape, kind) in tensors {
            let fail = |what| GgufError::Tensor { path: path.to_path_buf(), tensor: name.clone(), what };
            if !matches!(kind, TensorType::F32 | TensorType::F16 | TensorType::Q8_0) {
                return Err(fail(format!("its type is {}, expected F32, F16 or Q8_0", kind.name())));
            }
            let bytes = num_bytes(shape, *kind).map_err(fail)?;
            put_text(&mut header, name);
            header.extend((shape.len() as u32).to_le_bytes());
            for &side in shape.iter().rev() {
                header.extend((side as u64).to_le_bytes());
            }
            header.extend(kind.id().to_le_bytes());
            header.extend(at.to_le_bytes());
            at = (at + bytes).next_multiple_of(ALIGNMENT);
            listed.push((name.clone(), shape.iter().product(), *kind));
        }
        pad(&mut header);
        let mut to = BufWriter::new(File::create(path).map_err(GgufError::io(path))?);
        to.write_all(&header).map_err(GgufError::io(path))?;
        Ok(Self { path: path.to_path_buf(), to, tensors: listed, next: (0, 0), bytes: Vec::new() })
    }

    /// Writes the next values of the next tensor: whole rows, or all of it.
    ///
    /// # Errors
    /// Returns an error if the values are no whole blocks, more than the tensor has, or not finite or too large for its type, or if the
    /// file cannot be written.
    pub fn write(&mut self, values: &[f32]) -> Result<()> {
        let (index, done) = self.next;
        let Some((name, total, kind)) = self.tensors.get(index) else {
            let what = "values follow the last tensor, expected none".to_owned();
            return Err(GgufError::File { path: self.path.clone(), what });
        };
        let fail = |what| GgufError::Tensor { path: self.path.clone(), tensor: name.clone(), what };
        if done + values.len() > *total || !values.len().is_multiple_of(kind.block_values()) {
            let (got, left, block) = (values.len(), total - done, kind.block_values());
            return Err(fail(format!("got {got} values, expected at most {left} in blocks of {block}")));
        }
        // The largest scale and the largest number in half precision.
        let most = match kind {
            TensorType::F16 => 65504.0,
            TensorType::Q8_0 => 65504.0 * 127.0,
            _ => f32::MAX,
        };
        if let Some(at) = values.iter().position(|x| x.is_nan() || x.abs() > most) {
            let (at, got, name) = (done + at, values[at], kind.name());
            return Err(fail(format!(
                "value {at} is {got}, expected a number of {name}, at most {most} in magnitude"
            )));
        }
        self.bytes.clear();
        match kind {
            TensorType::F16 => blocks::to_f16(values, &mut self.bytes),
            TensorType::Q8_0 => blocks::to_q8_0(values, &mut self.bytes),
            _ => blocks::to_f32(values, &mut self.bytes),
        }
        self.next.1 = done + values.len();
        if self.next.1 == *total {
            // Blocks of 34 bytes: what precedes this piece of the tensor counts for the padding.
            let before = done / kind.block_values() * kind.block_bytes();
            let end = before + self.bytes.len();
            self.bytes.resize(self.bytes.len() + end.next_multiple_of(ALIGNMENT as usize) - end, 0);
            self.next = (index + 1, 0);
        }
        self.to.write_all(&self.bytes).map_err(GgufError::io(&self.path))
    }

    /// Completes the file and waits until it is stored.
    ///
    /// # Errors
    /// Returns an error if values of a tensor are missing or the file cannot be written.
    pub fn finish(mut self) -> Result<()> {
        if let Some((tensor, total, _)) = self.tensors.get(self.next.0) {
            let what = format!("{} values were written, expected {total}", self.next.1);
            return Err(GgufError::Tensor { path: self.path, tensor: tensor.clone(), what });
        }
        let done = self.to.flush().and_then(|()| self.to.get_ref().sync_all());
        done.map_err(GgufError::io(&self.path))
    }
}

fn pad(bytes: &mut Vec<u8>) {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT as usize), 0);
}

fn put_text(to: &mut Vec<u8>, text: &str) {
    to.extend((text.len() as u64).to_le_bytes());
    to.extend(text.as_bytes());
}

fn put_value(to: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(x) => to.push(*x),
        Value::I8(x) => to.extend(x.to_le_bytes()),
        Value::U16(x) => to.extend(x.to_le_bytes()),
        Value::I16(x) => to.extend(x.to_le_bytes()),
        Value::U32(x) => to.extend(x.to_le_bytes()),
        Value::I32(x) => to.extend(x.to_le_bytes()),
        Value::F32(x) => to.extend(x.to_le_bytes()),
        Value::Bool(x) => to.push(u8::from(*x)),
        Value::Text(x) => put_text(to, x),
        Value::List(list) => {
            to.extend(list.first().map_or(5, Value::type_id).to_le_bytes());
            to.extend((list.len() as u64).to_le_bytes());
            list.iter().for_each(|value| put_value(to, value));
        }
        Value::U64(x) => to.extend(x.to_le_bytes()),
        Value::I64(x) => to.extend(x.to_le_bytes()),
        Value::F64(x) => to.extend(x.to_le_bytes()),
    }
}
