//! Matrix products computed by cuBLASLt.
//!
//! The plan for a shape is the first one that cuBLASLt's heuristic returns. It is never the result of a measurement, so the same
//! library gives the same bits. Matrices in this crate are row-major and those of cuBLASLt are column-major, so cuBLASLt computes
//! `cᵀ = bᵀ aᵀ`.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;

use crate::device::Dtype;
use crate::error::{Error, Result};
use crate::product::{Factor, Product};

pub(crate) struct Blas {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: Mutex<HashMap<Key, Plan>>,
}

/// The properties of a product that determine its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Key {
    sizes: [usize; 6],
    flags: [bool; 5],
    /// Largest powers of two, up to 256, by which the addresses of the factors, the addend and the result are divisible.
    aligned: [u32; 4],
}

impl Key {
    fn new(p: &Product) -> Self {
        let low = |dtype| dtype == Dtype::Bf16;
        let aligned = [p.a.at, p.b.at, p.plus.unwrap_or(p.c), p.c].map(|at| 1 << at.trailing_zeros().min(8));
        Self {
            sizes: [p.m, p.n, p.k, p.a.ld, p.b.ld, p.ldc],
            flags: [p.a.transposed, p.b.transposed, p.plus.is_some(), low(p.a.dtype), low(p.c_dtype)],
            aligned,
        }
    }
}

#[derive(Clone, Copy)]
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    algorithm: sys::cublasLtMatmulAlgo_t,
}

fn data_type(dtype: Dtype) -> sys::cudaDataType {
    match dtype {
        Dtype::F32 => sys::cudaDataType::CUDA_R_32F,
        Dtype::Bf16 => sys::cudaDataType::CUDA_R_16BF,
    }
}

impl Blas {
    /// Size of the workspace in bytes, as NVIDIA recommends for Hopper.
    pub(crate) const WORKSPACE: usize = 32 << 20;

    pub(crate) fn new(workspace: u64) -> Result<Self> {
        // SAFETY: loading the library has no preconditions.
        if !unsafe { sys::is_culib_present() } {
            return Err(Error::Library { library: "libcublasLt", package: "nvidia-cublas" });
        }
        let handle = result::create_handle()
            .map_err(|error| Error::Driver { call: "cublasLtCreate", what: error.to_string() })?;
        Ok(Self { handle, workspace, plans: Mutex::default() })
    }

    pub(crate) fn product(&self, p: &Product, stream: CUstream) -> Result<()> {
        let failed =
            |error: result::CublasError| Error::Product { m: p.m, n: p.n, k: p.k, what: error.to_string() };
        let plan = {
            let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
            let key = Key::new(p);
            match plans.get(&key) {
                Some(&plan) => plan,
                None => {
                    let plan = self.plan(p, key).map_err(failed)?;
                    plans.insert(key, plan);
                    plan
                }
            }
        };
        let (alpha, beta) = (1.0f32, if p.plus.is_some() { 1.0f32 } else { 0.0 });
        let [first, second, out] = plan.layouts;
        // SAFETY: the handles are alive, and the addresses belong to arrays at least as large as the layouts state.
        unsafe {
            result::matmul(
                self.handle,
                plan.operation,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                p.b.at as *const c_void,
                first,
                p.a.at as *const c_void,
                second,
                p.plus.unwrap_or(p.c) as *const c_void,
                out,
                p.c as *mut c_void,
                out,
                &raw const plan.algorithm,
                self.workspace as *mut c_void,
                Self::WORKSPACE,
                stream.cast(),
            )
        }
        .map_err(failed)
    }

    fn plan(&self, p: &Product, key: Key) -> std::result::Result<Plan, result::CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Descriptor;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        // A row-major [rows, cols] matrix is a column-major [cols, rows] matrix.
        let factor = |f: Factor, rows: usize, cols: usize| {
            let [rows, cols] = if f.transposed { [cols, rows] } else { [rows, cols] };
            result::create_matrix_layout(data_type(f.dtype), cols as u64, rows as u64, f.ld as i64)
        };
        let layouts = [
            factor(p.b, p.k, p.n)?,
            factor(p.a, p.m, p.k)?,
            result::create_matrix_layout(data_type(p.c_dtype), p.n as u64, p.m as u64, p.ldc as i64)?,
        ];
        let operation = result::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )?;
        // These are the values of CUBLAS_OP_N and CUBLAS_OP_T in cublas_api.h, which the bindings of cuBLASLt lack.
        let transposed = |f: Factor| i32::from(f.transposed);
        let preference = result::create_matmul_pref()?;
        // SAFETY: each attribute is set to a value of its type and size.
        unsafe {
            for (which, value) in [
                (Descriptor::CUBLASLT_MATMUL_DESC_TRANSA, transposed(p.b)),
                (Descriptor::CUBLASLT_MATMUL_DESC_TRANSB, transposed(p.a)),
            ] {
                result::set_matmul_desc_attribute(
                    operation,
                    which,
                    (&raw const value).cast(),
                    size_of_val(&value),
                )?;
            }
            let [a, b, plus, c] = key.aligned;
            let workspace = Self::WORKSPACE as u64;
            let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(preference, most, (&raw const workspace).cast(), 8)?;
            for (which, value) in [
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plus),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
            ] {
                result::set_matmul_pref_attribute(preference, which, (&raw const value).cast(), 4)?;
            }
            let [first, second, out] = layouts;
            let found = result::get_matmul_algo_heuristic(
                self.handle,
                operation,
                first,
                second,
                out,
                out,
                preference,
            );
            let _ = result::destroy_matmul_pref(preference);
            Ok(Plan { operation, layouts, algorithm: found?.algo })
        }
    }
}

// SAFETY: the functions of cuBLASLt may be called from any thread. Plans are behind a lock and never destroyed.
unsafe impl Send for Blas {}
// SAFETY: as above. A single stream orders all uses of the workspace.
unsafe impl Sync for Blas {}
