//! Matrix products computed by cuBLASLt.
//!
//! The plan for a shape is the first one that cuBLASLt's heuristic returns. It is never the result of a measurement, so the same
//! library gives the same bits. The heuristic takes 20 to 100 µs by public reports, and nearly every pass and every expert has another
//! number of rows. So the number of rows is rounded up to a multiple of 64 for the plan. Matrices in this crate are row-major and those
//! of cuBLASLt are column-major, so cuBLASLt computes `cᵀ = bᵀ aᵀ`.

use std::ffi::{c_int, c_void};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use cudarc::cublaslt::result::CublasError;
use cudarc::cublaslt::sys;
use cudarc::driver::sys::CUstream;

use crate::device::Dtype;
use crate::error::{Error, Result};
use crate::libraries::{functions, load_blas};
use crate::product::{Factor, Product};
use crate::recent::Recent;

functions! {
    /// Functions of cuBLASLt.
    BlasFunctions {
        cublasLtGetVersion() -> usize;
        cublasLtCreate(*mut sys::cublasLtHandle_t) -> sys::cublasStatus_t;
        cublasLtMatrixLayoutCreate(*mut sys::cublasLtMatrixLayout_t, sys::cudaDataType, u64, u64, i64) -> sys::cublasStatus_t;
        cublasLtMatrixLayoutSetAttribute(sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayoutAttribute_t, *const c_void, usize) -> sys::cublasStatus_t;
        cublasLtMatrixLayoutDestroy(sys::cublasLtMatrixLayout_t) -> sys::cublasStatus_t;
        cublasLtMatmulDescCreate(*mut sys::cublasLtMatmulDesc_t, sys::cublasComputeType_t, sys::cudaDataType) -> sys::cublasStatus_t;
        cublasLtMatmulDescDestroy(sys::cublasLtMatmulDesc_t) -> sys::cublasStatus_t;
        cublasLtMatmulDescSetAttribute(sys::cublasLtMatmulDesc_t, sys::cublasLtMatmulDescAttributes_t, *const c_void, usize) -> sys::cublasStatus_t;
        cublasLtMatmulPreferenceCreate(*mut sys::cublasLtMatmulPreference_t) -> sys::cublasStatus_t;
        cublasLtMatmulPreferenceSetAttribute(sys::cublasLtMatmulPreference_t, sys::cublasLtMatmulPreferenceAttributes_t, *const c_void, usize) -> sys::cublasStatus_t;
        cublasLtMatmulPreferenceDestroy(sys::cublasLtMatmulPreference_t) -> sys::cublasStatus_t;
        cublasLtMatmulAlgoGetHeuristic(sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatmulPreference_t, c_int, *mut sys::cublasLtMatmulHeuristicResult_t, *mut c_int) -> sys::cublasStatus_t;
        cublasLtMatmulAlgoCheck(sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, sys::cublasLtMatrixLayout_t, *const sys::cublasLtMatmulAlgo_t, *mut sys::cublasLtMatmulHeuristicResult_t) -> sys::cublasStatus_t;
        cublasLtMatmul(sys::cublasLtHandle_t, sys::cublasLtMatmulDesc_t, *const c_void, *const c_void, sys::cublasLtMatrixLayout_t, *const c_void, sys::cublasLtMatrixLayout_t, *const c_void, *const c_void, sys::cublasLtMatrixLayout_t, *mut c_void, sys::cublasLtMatrixLayout_t, *const sys::cublasLtMatmulAlgo_t, *mut c_void, usize, sys::cudaStream_t) -> sys::cublasStatus_t;
    }
}

/// Returns the version that the library states, as `[major, minor]`.
pub(crate) fn version(functions: &BlasFunctions) -> [i32; 2] {
    // SAFETY: the function has no preconditions.
    let version = unsafe { (functions.cublasLtGetVersion)() } as i32;
    [version / 10_000, version % 10_000 / 100]
}

pub(crate) struct Blas {
    functions: BlasFunctions,
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: Mutex<Recent<Key, Plan>>,
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

/// Number of rows of which a plan's size is a multiple.
const UNIT: usize = 64;

/// Returns a product of the same kind whose numbers of rows are multiples of [`UNIT`]. What has its elements next to each other in a
/// matrix keeps its size, since plans differ in the alignment that they need.
fn rounded(p: &Product) -> Product {
    let up = |size: usize, is_row: bool| if is_row { size.next_multiple_of(UNIT) } else { size };
    Product { m: up(p.m, !p.a.transposed), k: up(p.k, p.a.transposed && !p.b.transposed), ..*p }
}

/// Returns the numbers of rows and columns of the layouts of `b`, `a` and `c`. A row-major `[rows, cols]` matrix is a column-major
/// `[cols, rows]` matrix.
fn layout_sizes(p: &Product) -> [[u64; 2]; 3] {
    let of = |factor: Factor, rows, cols| if factor.transposed { [rows, cols] } else { [cols, rows] };
    [of(p.b, p.k, p.n), of(p.a, p.m, p.k), [p.n, p.m]].map(|sizes| sizes.map(|size| size as u64))
}

#[derive(Clone, Copy)]
struct Plan {
    /// Sizes that the layouts have now, or zeros if the algorithm does not support those.
    sizes: [[u64; 2]; 3],
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

    /// Number of plans that are kept. A pass needs about 40.
    const MOST_PLANS: usize = 512;

    /// Loads cuBLASLt. `workspace` is the address of [`Self::WORKSPACE`] bytes of the current GPU.
    pub(crate) fn new(workspace: u64, libraries: &[PathBuf], driver: i32) -> Result<Self> {
        let (functions, _) = load_blas(libraries, Some(driver))?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: the address is valid.
        unsafe { (functions.cublasLtCreate)(&raw mut handle) }
            .result()
            .map_err(|error| Error::Driver { call: "cublasLtCreate", what: format!("{:?}", error.0) })?;
        Ok(Self { functions, handle, workspace, plans: Mutex::new(Recent::new(Self::MOST_PLANS)) })
    }

    pub(crate) fn product(&self, p: &Product, stream: CUstream) -> Result<()> {
        // The lock is held until the product is queued. No other thread can then destroy its plan, or change its sizes.
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let planned = rounded(p);
        let mut done = self.queue(&mut plans, p, &planned, stream);
        // A plan for more rows need not be one for these.
        if done.is_err() && layout_sizes(&planned) != layout_sizes(p) {
            done = self.queue(&mut plans, p, p, stream);
        }
        done.map_err(|error| Error::Product { m: p.m, n: p.n, k: p.k, what: format!("{:?}", error.0) })
    }

    /// Queues a product with the plan of another one, which may have more rows.
    fn queue(
        &self,
        plans: &mut Recent<Key, Plan>,
        p: &Product,
        planned: &Product,
        stream: CUstream,
    ) -> std::result::Result<(), CublasError> {
        let key = Key::new(planned);
        if plans.get(&key).is_none() {
            let plan = self.plan(planned, key)?;
            if let Some(forgotten) = plans.insert(key, plan) {
                self.destroy(forgotten.layouts, forgotten.operation);
            }
        }
        let Some(plan) = plans.get(&key) else {
            return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_INTERNAL_ERROR));
        };
        self.resize(plan, layout_sizes(p))?;
        let (alpha, beta) = (1.0f32, if p.plus.is_some() { 1.0f32 } else { 0.0 });
        let [first, second, out] = plan.layouts;
        // SAFETY: the handles are alive, and the addresses belong to arrays at least as large as the layouts state.
        unsafe {
            (self.functions.cublasLtMatmul)(
                self.handle,
                plan.operation,
                (&raw const alpha).cast(),
                p.b.at as *const c_void,
                first,
                p.a.at as *const c_void,
                second,
                (&raw const beta).cast(),
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
        .result()
    }

    /// Sets the sizes of a plan's layouts, and checks that its algorithm supports them.
    fn resize(&self, plan: &mut Plan, sizes: [[u64; 2]; 3]) -> std::result::Result<(), CublasError> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        if plan.sizes == sizes {
            return Ok(());
        }
        plan.sizes = Default::default();
        let names = [Attribute::CUBLASLT_MATRIX_LAYOUT_ROWS, Attribute::CUBLASLT_MATRIX_LAYOUT_COLS];
        for (&layout, sizes) in plan.layouts.iter().zip(&sizes) {
            for (name, size) in names.into_iter().zip(sizes) {
                // SAFETY: the layout is alive, and the attribute is a number of 8 bytes.
                unsafe {
                    let to = std::ptr::from_ref(size).cast();
                    (self.functions.cublasLtMatrixLayoutSetAttribute)(layout, name, to, 8).result()?;
                }
            }
        }
        let ([first, second, out], mut found) = (plan.layouts, std::mem::MaybeUninit::zeroed());
        // SAFETY: the handles are alive. The result is zero where the function does not write it, and valid with zeros.
        let found = unsafe {
            (self.functions.cublasLtMatmulAlgoCheck)(
                self.handle,
                plan.operation,
                first,
                second,
                out,
                out,
                &raw const plan.algorithm,
                found.as_mut_ptr(),
            )
            .result()?;
            found.assume_init()
        };
        found.state.result()?;
        if found.workspaceSize > Self::WORKSPACE {
            return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
        }
        plan.sizes = sizes;
        Ok(())
    }

    /// Destroys the handles of a plan that no table has. Those that were not created are null.
    fn destroy(&self, layouts: [sys::cublasLtMatrixLayout_t; 3], operation: sys::cublasLtMatmulDesc_t) {
        // SAFETY: the handles are alive, and nobody else has them.
        unsafe {
            for layout in layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = (self.functions.cublasLtMatrixLayoutDestroy)(layout);
            }
            if !operation.is_null() {
                let _ = (self.functions.cublasLtMatmulDescDestroy)(operation);
            }
        }
    }

    fn plan(&self, p: &Product, key: Key) -> std::result::Result<Plan, CublasError> {
        use sys::cublasLtMatmulDescAttributes_t as Descriptor;
        use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
        let f = &self.functions;
        let sizes = layout_sizes(p);
        let mut layouts = [std::ptr::null_mut(); 3];
        let (mut operation, mut preference) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: all addresses are valid, and each attribute is set to a value of its type and size.
        let found = (|| unsafe {
            let kinds = [(p.b.dtype, p.b.ld), (p.a.dtype, p.a.ld), (p.c_dtype, p.ldc)];
            for ((layout, (dtype, ld)), [rows, cols]) in layouts.iter_mut().zip(kinds).zip(sizes) {
                (f.cublasLtMatrixLayoutCreate)(layout, data_type(dtype), rows, cols, ld as i64).result()?;
            }
            let sums = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
            (f.cublasLtMatmulDescCreate)(&raw mut operation, sums, sys::cudaDataType::CUDA_R_32F).result()?;
            // These are the values of CUBLAS_OP_N and CUBLAS_OP_T in cublas_api.h, which the bindings of cuBLASLt lack.
            let transposed = |f: Factor| i32::from(f.transposed);
            for (which, value) in [
                (Descriptor::CUBLASLT_MATMUL_DESC_TRANSA, transposed(p.b)),
                (Descriptor::CUBLASLT_MATMUL_DESC_TRANSB, transposed(p.a)),
            ] {
                (f.cublasLtMatmulDescSetAttribute)(operation, which, (&raw const value).cast(), 4)
                    .result()?;
            }
            (f.cublasLtMatmulPreferenceCreate)(&raw mut preference).result()?;
            let [a, b, plus, c] = key.aligned;
            let workspace = Self::WORKSPACE as u64;
            let most = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            (f.cublasLtMatmulPreferenceSetAttribute)(preference, most, (&raw const workspace).cast(), 8)
                .result()?;
            for (which, value) in [
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, plus),
                (Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, c),
            ] {
                (f.cublasLtMatmulPreferenceSetAttribute)(preference, which, (&raw const value).cast(), 4)
                    .result()?;
            }
            let [first, second, out] = layouts;
            let mut found = std::mem::MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit();
            let mut count = 0;
            let asked = (f.cublasLtMatmulAlgoGetHeuristic)(
                self.handle,
                operation,
                first,
                second,
                out,
                out,
                preference,
                1,
                found.as_mut_ptr(),
                &raw mut count,
            );
            asked.result()?;
            if count == 0 {
                return Err(CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED));
            }
            let found = found.assume_init();
            found.state.result()?;
            Ok(found.algo)
        })();
        if !preference.is_null() {
            // SAFETY: the handle is alive, and nobody else has it.
            let _ = unsafe { (f.cublasLtMatmulPreferenceDestroy)(preference) };
        }
        found
            .map(|algorithm| Plan { sizes, operation, layouts, algorithm })
            .inspect_err(|_| self.destroy(layouts, operation))
    }
}

// SAFETY: the functions of cuBLASLt may be called from any thread. Plans are used and destroyed behind a lock.
unsafe impl Send for Blas {}
// SAFETY: as above. A single stream orders all uses of the workspace.
unsafe impl Sync for Blas {}
