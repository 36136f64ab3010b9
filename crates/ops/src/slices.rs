//! Access to the slices behind CPU tensors.

use candle_core::{CpuStorage, Device, Layout, Result, Storage, Tensor, bail};

/// The contiguous f32 data behind `storage`, as a custom op's forward sees it.
pub(crate) fn f32_of<'a>(op: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let CpuStorage::F32(data) = storage else {
        bail!("{op}: expected an f32 tensor, got {:?}", storage_dtype(storage));
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&data[start..end]),
        None => {
            bail!("{op}: expected a contiguous tensor, got shape {:?} with other strides", layout.shape())
        }
    }
}

fn storage_dtype(storage: &CpuStorage) -> candle_core::DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// Runs `f` on the contiguous f32 data of a CPU tensor, without a copy.
///
/// # Errors
/// A tensor of another dtype, device or with gaps.
pub fn with_f32<R>(tensor: &Tensor, f: impl FnOnce(&[f32]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(cpu) => Ok(f(f32_of("read", cpu, layout)?)),
        _ => bail!("read: expected a CPU tensor, got one on {:?}", tensor.device().location()),
    }
}

/// A `[rows, cols]` CPU tensor that takes ownership of `data`.
///
/// # Errors
/// `data.len() != rows * cols`.
pub fn rows_from_vec(data: Vec<f32>, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::from_vec(data, (rows, cols), &Device::Cpu)
}

/// A copy of a tensor's data.
///
/// # Errors
/// As [`with_f32`].
pub fn to_vec(tensor: &Tensor) -> Result<Vec<f32>> {
    with_f32(tensor, <[f32]>::to_vec)
}
